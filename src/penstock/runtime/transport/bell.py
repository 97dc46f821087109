"""Waking the watches of other ranks on this host, so that bad news is read at once and not at the next beat.

A datagram on an abstract Unix socket; it says nothing but "look". It takes the place of the event by which a
watch is woken inside its own process. Whoever rings without reason makes a watch look into the store once.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress

from penstock.runtime.transport.forks import close_in_forks

__all__ = ["Bell"]


class Bell:
    """As a `threading.Event` to the watch of this rank; `call` rings those of others."""

    def __init__(self, address: str) -> None:
        self.others: Callable[[], Iterable[str]] = tuple  # their addresses
        self._address = _name(address)
        self._socket = close_in_forks(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.setblocking(False)
        self._socket.bind(self._address)

    def wait(self, seconds: float | None) -> bool:
        """Whether it rang in that time."""
        try:
            return bool(select.select([self._socket], [], [], seconds)[0])
        except (OSError, ValueError):  # closed: the watch is to end
            return True

    def clear(self) -> None:
        """What has rung so far is old."""
        with suppress(OSError):
            while True:
                self._socket.recv(1)

    def set(self) -> None:
        """Wake this rank's watch."""
        self._ring(self._address)

    def call(self) -> None:
        """Wake the watches of the others."""
        for address in self.others():
            self._ring(_name(address))

    def _ring(self, address: bytes) -> None:
        with suppress(OSError):  # full: it rings already; closed: nobody listens any more
            self._socket.sendto(b"!", address)

    def close(self) -> None:
        self._socket.close()


def _name(address: str) -> bytes:
    return b"\0" + address.encode() + b"-bell"
