"""The bell that wakes the watches of other ranks: only ranks of the run ring it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from penstock.runtime.transport.failure.bell import Bell
from penstock.runtime.transport.own_socket import path_of


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
