"""Calls of torch in which the processes of a group connect: nothing but their timeout ends them, and they name nobody.

So while such a call lasts, a thread of every process counts in the store. Where the call fails, the process that was
lost is the one that has stopped counting, or never began.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch.distributed as dist

from penstock.errors import PeerFailure, PenstockError, RunError
from penstock.runtime.transport.distributed.member import has_agent
from penstock.runtime.transport.failure.blame import name_ranks
from penstock.runtime.transport.failure.peer_failures import STORE_GONE

COUNT_SECONDS = 0.5  # Seconds between two counts.
QUIET_SECONDS = 4.0  # A process that does not count for so long is lost.


@contextmanager
def joining(store: Any, rank: int, ranks: int, place: str) -> Iterator[None]:
    """Surround a call that connects all ranks; where it fails, name the rank that was lost.

    `place` is a name that no other such call has in the same store.
    """
    counts = _Counts(store, rank, ranks, f"penstock/joining/{place}")
    try:
        counts.begin()
        yield
    except PenstockError:
        raise
    except RuntimeError as error:  # Gloo raises it, or the store.
        raise counts.lost(error) from error
    finally:
        counts.end()


def store_gone(rank: int, error: Exception) -> RunError:
    """Return what it means that the store of the group is gone: its host is, where a rank has it."""
    if not has_agent() and rank != 0:
        return PeerFailure(0, STORE_GONE)
    return RunError(f"the store of the run is gone ({_in_short(error)}): the host that has it is; start the run again")


class _Counts:
    def __init__(self, store: Any, rank: int, ranks: int, prefix: str) -> None:
        self._store, self._rank, self._ranks, self._prefix = store, rank, ranks, prefix
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        own = self._store.clone()  # A store answers one question at a time, and the call may wait in the other.
        own.set(self._key(self._rank), "0")
        self._thread = threading.Thread(target=self._run, args=(own,), name="penstock-joining", daemon=True)
        self._thread.start()

    def _run(self, own: Any) -> None:
        numbers = count(1)
        with suppress(dist.DistError):  # The store is gone, which the call itself finds out.
            while not self._ended.wait(COUNT_SECONDS):
                own.set(self._key(self._rank), str(next(numbers)))

    def _key(self, rank: int, name: str = "count") -> str:
        return f"{self._prefix}/{name}/{rank}"

    def lost(self, error: RuntimeError) -> RunError:
        """Find out who is lost, once the call has failed here."""
        try:
            before = self._read()
            time.sleep(QUIET_SECONDS)
            after = self._read()
            left = {rank for rank in before if self._store.check([self._key(rank, "left")])}
            self._store.set(self._key(self._rank, "left"), "")  # This one is about to stop as well.
        except dist.DistError as gone:
            return store_gone(self._rank, gone)
        quiet = [rank for rank in before if before[rank] == after[rank] and rank not in left]
        if not quiet:
            return RunError(f"rank {self._rank} could not connect to the others: {_in_short(error)}")
        more = "" if len(quiet) == 1 else f" (as {name_ranks(quiet[1:])})"
        return PeerFailure(quiet[0], f"died or left{more} while rank {self._rank} waited for all ranks to connect")

    def _read(self) -> dict[int, bytes]:
        """Read the count of every other rank; nothing of one that never began."""
        keys = {rank: self._key(rank) for rank in range(self._ranks) if rank != self._rank}
        return {rank: self._store.get(key) if self._store.check([key]) else b"" for rank, key in keys.items()}

    def end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(COUNT_SECONDS)


def _in_short(error: Exception) -> str:
    """Return the first sentence of what torch says: what follows is a list of its functions."""
    return str(error).splitlines()[0].split(". ")[0]
