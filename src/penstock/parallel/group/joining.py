"""Calls of torch in which the processes of a group connect: nothing but their timeout ends them, and they name nobody.

So while such a call lasts, a thread of every process counts in the store. Where the call fails, the process that was
lost is the one that has stopped counting, or never began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from penstock.errors import PeerFailure, PenstockError, RunError
from penstock.runtime.transport.distributed.member import has_agent
from penstock.runtime.transport.failure.blame import name_ranks
from penstock.runtime.transport.failure.peer_failures import STORE_GONE

COUNT_SECONDS = 0.5  # between two counts
QUIET_SECONDS = 4.0  # without a count: a process is lost


@contextmanager
def joining(store: Any, rank: int, ranks: int, place: str) -> Iterator[None]:
    """A context around a call that connects all ranks; where it fails, the rank that was lost is named.

    Args:
        store: The store of the group.
        rank: This process.
        ranks: How many there are.
        place: A name of this call that no other call has in the same store.
    """
    counted = _Counts(store, rank, ranks, place)
    try:
        counted.begin()
        yield
    except PenstockError:
        raise
    except RuntimeError as error:  # of gloo, or of the store
        raise counted.lost(error) from error
    finally:
        counted.end()


def store_gone(rank: int, error: Exception) -> RunError:
    """What it means that the store of the group is gone: its host is, where a rank has it."""
    if has_agent() or rank == 0:
        return RunError(
            f"the store of the run is gone ({_in_short(error)}): the host that has it is; start the run again"
        )
    return PeerFailure(0, STORE_GONE)


class _Counts:
    def __init__(self, store: Any, rank: int, ranks: int, place: str) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._prefix = f"penstock/joining/{place}"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        own = self._store.clone()  # a store answers one question at a time, and the call may wait in the other
        self._count(own, 0)
        self._thread = threading.Thread(target=self._run, args=(own,), name="penstock-joining", daemon=True)
        self._thread.start()

    def _run(self, own: Any) -> None:
        number = 0
        with suppress(dist.DistError):  # the store is gone, which the call itself finds out
            while not self._ended.wait(COUNT_SECONDS):
                number += 1
                self._count(own, number)

    def _count(self, own: Any, number: int) -> None:
        own.set(self._key(self._rank), str(number))

    def _key(self, rank: int, name: str = "count") -> str:
        return f"{self._prefix}/{name}/{rank}"

    def lost(self, error: RuntimeError) -> RunError:
        """Who is, once the call has failed here."""
        try:
            before = self._read()
            time.sleep(QUIET_SECONDS)
            after = self._read()
            quiet = [rank for rank in before if before[rank] == after[rank] and not self._has_left(rank)]
            self._store.set(self._key(self._rank, "left"), "")  # this one is about to stop as well
        except dist.DistError as gone:
            return store_gone(self._rank, gone)
        if not quiet:
            return RunError(f"rank {self._rank} could not connect to the others: {_in_short(error)}")
        more = "" if len(quiet) == 1 else f" (as {name_ranks(quiet[1:])})"
        return PeerFailure(quiet[0], f"died or left{more} while rank {self._rank} waited for all ranks to connect")

    def _read(self) -> dict[int, bytes]:
        """The count of every other rank; nothing of one that never began."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        return {rank: self._peek(self._key(rank)) for rank in others}

    def _peek(self, key: str) -> bytes:
        found: bytes = self._store.get(key) if self._store.check([key]) else b""
        return found

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([self._key(rank, "left")]))

    def end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(COUNT_SECONDS)


def _in_short(error: Exception) -> str:
    """The first sentence of what torch says: what follows is a list of its functions."""
    return str(error).splitlines()[0].split(". ")[0]
