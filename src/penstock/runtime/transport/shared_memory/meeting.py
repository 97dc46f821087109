"""How ranks on one host find each other: over the process group's store, then by Unix sockets.

Each rank listens on a socket that only its own user reaches (`own_socket`), and puts its address into the store with a
token and with where it is. Ranks are near if they run under the same kernel, network and process namespaces and user,
on CPU tensors. Of two near ranks the higher one connects, and says in the store where that did not work; so both ends
of a link always take the same way. Each end draws a number, and the other shows by a code of both numbers that it has
the token and the run's secret. Whoever else knocks is another user, or cannot make the code, and is turned away.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import MessageError
from penstock.runtime.messages.secret import CODE_BYTES, code_of, is_ours
from penstock.runtime.messages.store import Asker
from penstock.runtime.transport.failure import notes
from penstock.runtime.transport.forks import close_in_forks
from penstock.runtime.transport.own_socket import OwnSocket, path_of
from penstock.runtime.transport.shared_memory.blocks import allocate

NONCE_BYTES = 32
HELLO = struct.Struct(f"<I{NONCE_BYTES}s")
LOOK_SECONDS = 0.02  # Between two looks at what others have done.
ANSWER_SECONDS = 20.0  # A process of the same user that has connected must show its code within this time.


class Address(NamedTuple):
    """Where a rank is, and how to reach it."""

    host: str
    socket: str  # The socket that it listens on.
    token: str
    device: str

    def apart(self, other: Address) -> str | None:
        """Return why two ranks cannot share memory, or None."""
        if self.host != other.host or not self.host:
            return "on different hosts"
        if {self.device, other.device} != {"cpu"}:
            return "not on the CPU"
        return None


def missing_here() -> str | None:
    """Return what this machine lacks for shared memory between ranks, or None."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return f"it needs memfd_create, which {sys.platform} does not have"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it relies on the memory order of x86-64, and this machine is {platform.machine()}"
    return None


def this_host() -> str:
    """Return what is equal for processes that can pass descriptors to each other; empty where nobody can."""
    if missing_here() is not None:
        return ""
    try:
        os.close(allocate(1))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
        return f"{boot} {' '.join(spaces)} {os.getuid()}"
    except OSError:
        return ""


def read_note(kind: str, name: str, text: bytes) -> tuple[Any, ...]:
    """Read what the store has under this name, to which anybody who reaches it can write."""
    try:
        return notes.read(kind, name, text)
    except notes.Tampered as error:
        raise MessageError(f"under {name}, the store holds something {notes.STRANGER}") from error


class Meeting:
    """One rank's part. `wait` is called while another rank is late, with its number; it raises to end that."""

    def __init__(
        self,
        store: Any,
        prefix: str,
        rank: int,
        ranks: int,
        device: str,
        wait: Callable[[int, float], None],
    ) -> None:
        self._store, self._prefix = store, prefix
        self._rank, self._wait = rank, wait
        self._asker: Asker | None = None
        self._addresses: dict[int, Address] = {}
        self._accepted: dict[int, socket.socket] = {}
        self._listener = OwnSocket(socket.SOCK_SEQPACKET)
        self._listener.listen(max(ranks, 8))
        self._listener.settimeout(LOOK_SECONDS)
        self.mine = Address(this_host(), self._listener.address, secrets.token_hex(16), device)
        self._write(f"place/{rank}", *self.mine)

    def address_of(self, rank: int) -> Address:
        """Return where a rank is; wait until it has reported that."""
        if rank == self._rank:
            return self.mine
        if rank not in self._addresses:
            start = time.monotonic()
            while (found := self._read("place", str(rank))) is None:
                self._wait(rank, start)
                time.sleep(LOOK_SECONDS / 10)
            self._addresses[rank] = Address(*found)
        return self._addresses[rank]

    def join(self, peer: int) -> socket.socket | str:
        """Return a connection to a near rank, or why there is none. Both ranks call this, and get the same."""
        return self._connect(peer) if self._rank > peer else self._accept(peer)

    def _connect(self, peer: int) -> socket.socket | str:
        address = self.address_of(peer)
        connection = close_in_forks(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            connection.settimeout(LOOK_SECONDS)
            self._knock(connection, peer, address.socket)
            if _user(connection) != os.getuid():
                raise PermissionError("its process belongs to another user")
            self._introduce(connection, peer, address.token)
        except OSError as error:
            connection.close()
            reason = f"rank {self._rank} cannot connect to rank {peer}: {error}"
            self._write(f"apart/{peer}/{self._rank}", reason)
            return reason
        return connection

    def _knock(self, connection: socket.socket, peer: int, address: str) -> None:
        """Connect; strangers who knock and stay may leave no room, until the other end turns them away."""
        start = time.monotonic()
        while True:
            try:
                connection.connect(path_of(address))
                return
            except BlockingIOError:
                self._wait(peer, start)
                time.sleep(LOOK_SECONDS / 10)

    def _introduce(self, connection: socket.socket, peer: int, token: str) -> None:
        """Show that this is a rank of the run, once the other end has; it answers when it comes to this."""
        mine, start = HELLO.pack(self._rank, secrets.token_bytes(NONCE_BYTES)), time.monotonic()
        connection.send(mine)
        while True:
            try:
                answer = connection.recv(NONCE_BYTES + CODE_BYTES + 1)
                break
            except TimeoutError:
                self._wait(peer, start)
        theirs, code = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not is_ours(b"accepts" + mine + theirs, code, token.encode()):
            raise PermissionError("it does not have the run's secret")
        connection.send(code_of(b"connects" + mine + theirs, token.encode()))

    def _authenticate(self, connection: socket.socket) -> int | None:
        """Return the rank at the other end, if it is one of the run."""
        token, theirs = self.mine.token.encode(), connection.recv(HELLO.size + 1)
        if len(theirs) != HELLO.size:
            return None
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.send(mine + code_of(b"accepts" + theirs + mine, token))
        is_rank = is_ours(b"connects" + theirs + mine, connection.recv(CODE_BYTES + 1), token)
        return int(HELLO.unpack(theirs)[0]) if is_rank else None

    def _accept(self, peer: int) -> socket.socket | str:
        start = time.monotonic()
        while peer not in self._accepted:
            if self._take_caller():
                continue
            reason = self._read("apart", f"{self._rank}/{peer}")
            if reason is not None:
                return str(reason[0])
            self._wait(peer, start)
        return self._accepted.pop(peer)

    def _take_caller(self) -> bool:
        """Let in whoever is a rank of the run; False if nobody called."""
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return False
        close_in_forks(connection).settimeout(ANSWER_SECONDS)
        if _user(connection) == os.getuid():
            with suppress(OSError):
                caller = self._authenticate(connection)
                if caller is not None:
                    self._accepted[caller] = connection
                    return True
        connection.close()
        return True

    def _write(self, name: str, *parts: Any) -> None:
        self._store.set(f"{self._prefix}/{name}", notes.write(f"{self._prefix}/{name}", *parts))

    def _read(self, kind: str, whose: str) -> tuple[Any, ...] | None:
        """Return what the store has of that kind; if it does not answer, somebody is silent, see `watch`."""
        start, name = time.monotonic(), f"{self._prefix}/{kind}/{whose}"

        def hopeless(_: float) -> bool:
            self._wait(self._rank, start)
            return False

        if self._asker is None:
            self._asker = Asker(self._store, f"penstock-meeting-{self._rank}")
        if not self._asker.ask("check", [name], patience=LOOK_SECONDS, give_up=hopeless):
            return None
        return read_note(kind, name, self._asker.ask("get", name, patience=LOOK_SECONDS, give_up=hopeless))

    def rest(self) -> None:
        """Stop the thread that asks the store: all that was wanted has been found, for now."""
        if self._asker is not None:
            self._asker.close(1.0)
            self._asker = None

    def close(self) -> None:
        self.rest()
        for connection in (self._listener, *self._accepted.values()):
            connection.close()


def _user(connection: socket.socket) -> int:
    """Return whose process is at the other end, as the kernel reports it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
