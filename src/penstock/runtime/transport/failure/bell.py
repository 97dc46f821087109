"""Waking the watches of other ranks on this host, so that bad news is read at once and not at the next beat.

A datagram on a Unix socket that only this user reaches (`own_socket`) says nothing but "look", with the code of the
run's secret. Whoever else rings is not heard: the kernel says whose process has sent it, the code if it is of this run.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic

from penstock.runtime.messages.secret import CODE_BYTES, code_of, is_ours
from penstock.runtime.transport.own_socket import OwnSocket, path_of

MOST_DATAGRAMS = 1000  # So many are taken for old at once.
_KEY = b"the bell"
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Bell:
    """As a `threading.Event` to the watch of this rank; `call` rings those of others."""

    def __init__(self) -> None:
        self.others: Callable[[], Iterable[str]] = tuple  # Their addresses.
        self._user = os.getuid()
        self._socket = OwnSocket(socket.SOCK_DGRAM)
        self.address = self._socket.address
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def wait(self, seconds: float) -> bool:
        """Return whether it rang in that time."""
        deadline = monotonic() + seconds
        try:
            while select.select([self._socket], [], [], max(0.0, deadline - monotonic()))[0]:
                if self._heard():
                    return True
                if monotonic() > deadline:  # Whoever floods it does not keep the watch from looking.
                    break
        except (OSError, ValueError):  # closed: the watch is to end
            return True
        return False

    def _heard(self) -> bool:
        """Take one datagram; whether a rank of this run has sent it."""
        code, attached, _, _ = self._socket.recvmsg(CODE_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size))
        users = [
            _CREDENTIALS.unpack(data)[1]
            for level, kind, data in attached
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) == _CREDENTIALS.size
        ]
        return users == [self._user] and is_ours(self.address.encode(), code, _KEY)

    def clear(self) -> None:
        """Take what has rung so far for old."""
        with suppress(OSError):
            for _ in range(MOST_DATAGRAMS):
                self._socket.recv(CODE_BYTES + 1)

    def set(self) -> None:
        self._ring(self.address)

    def call(self) -> None:
        for address in self.others():
            self._ring(address)

    def _ring(self, address: str) -> None:
        with suppress(OSError):  # full: it rings already; closed: nobody listens any more
            self._socket.sendto(code_of(address.encode(), _KEY), path_of(address))

    def close(self) -> None:
        self._socket.close()
