"""Somebody reaches the store, or a connection, and writes what they like: nothing of it is run, and nothing hangs."""

from __future__ import annotations

import base64
import enum
import json
import os
import pickle
import random
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import MessageError, PeerFailure, PenstockError, UsageError
from penstock.messages import plain, secret
from penstock.runtime.transport import own_socket
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure import notes
from penstock.runtime.transport.failure.bell import Bell
from penstock.runtime.transport.failure.silence import Marks
from penstock.runtime.transport.gloo.incoming import GlooIncoming
from penstock.runtime.transport.gloo.messages import CHANGED, HEADER, MAGIC, Header, blank_header
from penstock.runtime.transport.layout import encoding
from penstock.runtime.transport.layout.layout import Book, Layout, flatten
from penstock.runtime.transport.own_socket import OwnSocket, path_of
from penstock.runtime.transport.shared_memory.meeting import Place


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def loads_of(path: str) -> list[bytes]:
    """What a stranger might write, in the forms that have been read some time."""
    bomb = pickle.dumps(Bomb(path))
    return [
        bomb,
        base64.b64encode(bomb),
        base64.b64encode(b"0" * secret.CODE_BYTES + bomb),
        b"\x00\xff" * 50,
        b"",
        b"[" * 100_000,
        json.dumps({"$PeerFailure": {"rank": "0", "cause": 1}}).encode(),
        json.dumps({"$nothing": []}).encode(),
        base64.b64encode(json.dumps({"$tuple": [1, 2, 3]}).encode()),
    ]


@pytest.mark.parametrize("kind", notes.PARTS)
def test_what_no_rank_has_written_is_not_taken_from_the_store(kind: str, tmp_path: Path) -> None:
    for content in loads_of(str(tmp_path / "boom")):
        with pytest.raises(notes.Tampered):
            notes.read(kind, kind, content)
    assert not (tmp_path / "boom").exists()


def test_a_note_that_is_copied_under_another_name_is_not_taken() -> None:
    failure = PeerFailure(1, "its step failed, and the next one did not")
    text = notes.write("penstock/0/news/3", failure).encode()
    assert str(notes.read("news", "penstock/0/news/3", text)[0]) == str(failure)
    for kind, name in (("news", "penstock/0/news/4"), ("verdict", "penstock/0/verdict")):
        with pytest.raises(notes.Tampered):
            notes.read(kind, name, text)


def test_a_mark_that_is_written_again_excuses_no_silence() -> None:
    store: dict[str, Any] = {}

    def ask(method: str, *arguments: Any) -> Any:
        if method == "set":
            store[arguments[0]] = arguments[1].encode()
            return None
        return store[arguments[0]] if method == "get" else arguments[0][0] in store

    stopped, other = (Marks("compiling", ask, str, rank, 2, fresh=0.05) for rank in (0, 1))
    recorded = []
    for _ in range(3):
        stopped.tell(True)
        recorded.append(dict(store))
        assert other.anybody()
    time.sleep(0.1)
    for old in recorded:
        store.update(old)
        assert not other.anybody()
    store["compiling/0"] = b"4"
    with pytest.raises(notes.Tampered):
        other.anybody()


def test_a_pickle_is_read_only_from_a_peer_that_is_known(tmp_path: Path) -> None:
    bomb = Bomb(str(tmp_path / "boom"))
    values = Layout.of(flatten([torch.ones(1), bomb]), False).text
    container = Layout.of(flatten(defaultdict(bomb.__reduce__()[0], a=torch.ones(1))), False).text
    for text in (values, container):
        with pytest.raises(MessageError, match="in a run without a secret"):
            encoding.load(text, is_known=False)
    assert not (tmp_path / "boom").exists()
    Layout.load(values, is_known=True).build(torch.zeros(256, dtype=torch.uint8), (), None)
    assert (tmp_path / "boom").exists()


def test_a_changed_message_cannot_point_outside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    end = GlooIncoming(Channel(0, 1, "F", 0, 1), 0, None, Book(), None)  # type: ignore[arg-type]
    for told in (0, 65, 1 << 40):
        body, buffer = blank_header()
        HEADER.pack_into(buffer, 0, MAGIC, CHANGED, 0, told, 0, 0, 0, 0, 0, 1)
        header = Header(MAGIC, CHANGED, 0, HEADER.size, 0, 0, 0, 0, 0, 1)
        monkeypatch.setattr(end, "_follow", lambda *_, body=body: body)
        with pytest.raises(MessageError, match=rf"a message of 64 bytes says that {told} of them are its layout"):
            end._take_changed(0, header)


def test_nor_a_place_or_a_layout_or_a_value(tmp_path: Path) -> None:
    for content in loads_of(str(tmp_path / "boom")):
        with pytest.raises(MessageError):
            Place.read("place/1", content, 1)
        with pytest.raises(MessageError):
            encoding.load(content, is_known=True)
        with pytest.raises((MessageError, plain.NotPlainError)):
            encoding.load_plain(content)
        with pytest.raises((MessageError, plain.NotPlainError)):
            encoding.load_plain(b"P" + content)
    assert not (tmp_path / "boom").exists()


def test_a_layout_makes_no_type_that_is_not_a_known_container() -> None:
    spec = ("collections:namedtuple", {"type": "subprocess:Popen"}, [None])
    with pytest.raises(MessageError, match=r"subprocess:Popen.*neither a named tuple"):
        encoding.load(plain.dumps(("", spec, [None], b"", False)), is_known=True)


def test_mutated_messages_are_read_or_refused() -> None:
    chance = random.Random(3)
    for device in ("bogus", "cuda:99999999999"):
        with pytest.raises(plain.NotPlainError, match="torch does not have"):
            plain.loads(json.dumps({"$device": device}).encode())
    good = plain.dumps((3, {"a": (1, 2.5, None, "x" * 40)}, [torch.float32, b"bytes", {1, 2}, float("nan")]))
    for _ in range(2000):
        content = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            plain.loads(bytes(content[: chance.randint(1, len(content))]))
        except plain.NotPlainError:
            continue


def test_a_secret_that_others_could_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o644)
    monkeypatch.setenv(secret.FILE_VARIABLE, str(path))
    for mode, problem in ((0o644, "chmod 600"), (0o600, "")):
        path.chmod(mode)
        secret._secret.cache_clear()
        if problem:
            with pytest.raises(PenstockError, match=problem):
                secret.has_secret()
        else:
            assert secret.has_secret()
            assert secret.unsigned(secret.signed(b"words")) == b"words"
            assert secret.unsigned(b"0" * secret.CODE_BYTES + b"words") is None
    path.write_text("\n")
    secret._secret.cache_clear()
    with pytest.raises(PenstockError, match="the file is empty"):
        secret.has_secret()
    secret._secret.cache_clear()


def test_a_bell_hears_only_ranks_of_its_run() -> None:
    bell = Bell()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            for _ in range(5):
                stranger.sendto(b"!", path_of(bell.address))
        assert not bell.wait(0.05)
        bell.set()
        assert bell.wait(30)
    finally:
        bell.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_even_ring_or_knock(tmp_path: Path) -> None:
    """Abstract sockets took connections and datagrams of everybody, until the rank turned them away."""
    own = [OwnSocket(kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)]
    own[1].listen(1)
    paths = [path_of(each.address) for each in own]
    program = f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for kind, path in zip((socket.SOCK_DGRAM, socket.SOCK_SEQPACKET), {paths}):
    with socket.socket(socket.AF_UNIX, kind) as stranger:
        try:
            stranger.connect(path)
        except OSError as error:
            print(type(error).__name__)
"""
    try:
        for kind, path in zip((socket.SOCK_DGRAM, socket.SOCK_SEQPACKET), paths, strict=True):
            with socket.socket(socket.AF_UNIX, kind) as friend:
                friend.connect(path)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == ["PermissionError", "PermissionError"]
    finally:
        for each in own:
            each.close()


@pytest.mark.parametrize("folder", ["/dev/shm", None])
def test_a_socket_has_no_name_on_disk_and_no_descriptor_once_closed(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / ("long" * 50)  # longer than the name of a Unix socket may be
    where.mkdir()
    monkeypatch.setattr(own_socket, "MEMORY", folder or str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    before = len(os.listdir("/proc/self/fd")), set(os.listdir(folder or where))
    own = OwnSocket(socket.SOCK_SEQPACKET)
    assert set(os.listdir(folder or where)) == before[1]
    assert stat.S_IMODE(os.stat(path_of(own.address)).st_mode) == 0o600
    own.close()
    assert len(os.listdir("/proc/self/fd")) == before[0]
    with pytest.raises(OSError, match="No such file"):
        os.stat(path_of(own.address))
    for foreign in ("/run/bus", "1/../../x", "self/3", "1/2/3", ""):
        with pytest.raises(ConnectionError, match="not the address of a rank"):
            path_of(foreign)


def test_no_place_for_a_socket_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_socket, "MEMORY", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="set TMPDIR to a folder of this host"):
        OwnSocket(socket.SOCK_DGRAM)


def test_a_flooded_bell_does_not_keep_the_watch_from_looking() -> None:
    bell, quiet = Bell(), threading.Event()

    def flood() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.setblocking(False)
            while not quiet.is_set():
                with suppress(BlockingIOError):
                    stranger.sendto(b"!", path_of(bell.address))

    floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
    for thread in floods:
        thread.start()
    try:
        start = time.monotonic()
        for _ in range(20):
            assert not bell.wait(0.01)
        assert time.monotonic() - start < 20
    finally:
        quiet.set()
        for thread in floods:
            thread.join()
        bell.close()


class Colour(enum.Enum):
    RED = 1


class Painter(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x), Colour.RED


class Seer(nn.Linear):
    def forward(self, x: Any, colour: Any) -> Any:
        return super().forward(x)


def passes_an_enum(say: Callable[[Any], None], transport: str) -> None:
    pipe = penstock.Pipeline(
        [Painter(4, 4), Seer(4, 4)], microbatches=2, loss_fn=F.mse_loss, timeout=10, transport=transport
    )
    try:
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
        say("trained")
    except PenstockError as error:
        say(str(error))
    pipe.close()


def test_without_a_secret_only_processes_of_one_user_pass_each_other_pickles() -> None:
    for transport, answer in (("shared", "trained"), ("distributed", "can only travel pickled")):
        for ending in launch(2, passes_an_enum, transport):
            assert len(ending.said) == 1, ending.error
            assert answer in ending.said[0], ending.said


def trains_beside_a_stranger(say: Callable[[Any], None], path: str, only: str) -> None:
    """Rank 0 also plays a stranger who writes to every key that there is, and to those that a rank may read later."""
    store = dist.distributed_c10d._get_default_store()
    stop = threading.Event()

    def disturb() -> None:
        while isinstance(server := getattr(disturb, "store", store), dist.PrefixStore):
            disturb.store = server.underlying_store  # type: ignore[attr-defined]
        number = 0
        while not stop.is_set():
            names = [key for key in server.list_keys() if "penstock" in key]
            roots = {name[: name.index("penstock/") + len("penstock/0")] for name in names}
            names += [
                f"{root}/{word}"
                for root in roots
                for word in (only, "state/0", "state/1", "call/0", "seen/0", "compiling/0", "outside/1")
            ]
            for name in names:
                number += 1
                server.set(name, loads_of(path)[number % len(loads_of(path))])
            time.sleep(0.01)

    torch.manual_seed(0)
    pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss, timeout=10)
    thread = threading.Thread(target=disturb, daemon=True)
    if dist.get_rank() == 0:
        thread.start()
    try:
        for _ in range(100):
            pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
            time.sleep(0.02)
        say("trained")
    except PenstockError as error:
        say(str(error))
    stop.set()
    os._exit(0)


@pytest.mark.parametrize("key", ["verdict", "news/3", "alarm"])
def test_a_stranger_at_the_store_can_end_a_run_but_not_run_code(key: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        endings = launch(2, trains_beside_a_stranger, f"{folder}/boom", key, tcp=True)
        assert [ending.code for ending in endings] == [0, 0], [ending.error for ending in endings]
        for ending in endings:
            assert len(ending.said) == 1
            assert "somebody else writes to it" in ending.said[0], ending.said
        assert not Path(f"{folder}/boom").exists()
