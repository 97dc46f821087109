"""Unix sockets that only their own user reaches, and that leave nothing behind."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.runtime.transport import own_socket
from penstock.runtime.transport.own_socket import OwnSocket, path_of


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
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
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
