"""Where the ranks of one attempt meet, in a store that outlives attempts, and where those without a place wait.

torch's elastic agents keep one store for all attempts, and nothing in a rank's environment tells one attempt from
the next on every host: each agent counts the restarts of its own ranks. Under the same keys, a new rank would find the
addresses of dead ones. So rank 0 thinks of a new prefix each time, and gives it to the others: each asks with a word
of its own, which nobody has used before, and takes only the answer to that word, with the code of the run's secret.

torch's own rendezvous listens on all interfaces, also for a run that never leaves its host, and nobody who connects to
a store has to prove anything. So ranks of one host meet in a store whose socket is made first, bound to 127.0.0.1. What
the one agent tells itself (how many ranks there are, and which) stays in its own memory, where no other user of the
host can write.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.rendezvous import rendezvous

from penstock.errors import RunError
from penstock.parallel.group.joining import store_gone
from penstock.runtime.transport.failure import notes

BEAT = 0.02
LONGEST_BEAT = 0.2
LONGEST_WORD = 100
STAND_BY_BEAT = 0.5
ENDED = "penstock/ended"
LET_GO = timedelta(seconds=10)  # the store may end with this process, so that the others must have read it before


def new_prefix(store: Any, rank: int, count: int, limit: timedelta) -> str:
    """Agree on a prefix that all ranks of this attempt have, and no rank of another one."""
    try:
        return _hand_out(store, count, limit) if rank == 0 else _ask(store, rank, count, limit)
    except DistError as error:
        raise store_gone(rank, error) from error


def reach_store(limit: timedelta) -> tuple[Any, int]:
    """Return the store that the launcher's environment names, and this process's rank."""
    try:
        store, rank, _ = next(rendezvous("env://", timeout=limit))
    except DistError as error:
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RunError(
            f"the store of the run at {place} cannot be reached ({str(error).splitlines()[0]}): its host is gone, or "
            f"this one has no way to it"
        ) from error
    return store, rank


def _ask(store: Any, rank: int, count: int, limit: timedelta) -> str:
    word = uuid.uuid4().hex
    store.set(f"penstock/ask/{rank}", word)
    name = f"penstock/answer/{word}"
    deadline = time.monotonic() + limit.total_seconds()
    if not _comes(store, name, deadline):
        raise RunError(f"rank 0 has not come within {limit.total_seconds():g} s")
    try:
        (prefix,) = notes.read("answer", name, store.get(name))
    except notes.Tampered as error:
        raise RunError(f"under the answer of rank 0, the store holds something {notes.STRANGER}") from error
    store.set(f"penstock/got/{prefix}/{rank}", "")
    if not _comes(store, f"penstock/all/{prefix}", deadline):
        missing = [other for other in range(1, count) if not store.check([f"penstock/got/{prefix}/{other}"])]
        raise RunError(_late(missing or [0], limit))
    return str(prefix)


def _comes(store: Any, name: str, deadline: float) -> bool:
    """Wait for something that rank 0 writes; in slices, because a signal does not interrupt the store."""
    pause = BEAT
    while not store.check([name]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_BEAT)
    return True


def _late(missing: Iterable[int], limit: timedelta) -> str:
    return f"ranks {sorted(missing)} have not come within {limit.total_seconds():g} s"


def _hand_out(store: Any, count: int, limit: timedelta) -> str:
    prefix, deadline = uuid.uuid4().hex, time.monotonic() + limit.total_seconds()
    missing = set(range(1, count))
    while missing:
        for other in sorted(missing):
            if store.check([f"penstock/got/{prefix}/{other}"]):
                missing.discard(other)
            elif store.check([f"penstock/ask/{other}"]):  # perhaps still the word of a dead rank: asked again below
                name = f"penstock/answer/{store.get(f'penstock/ask/{other}').decode(errors='replace')[:LONGEST_WORD]}"
                store.set(name, notes.write(name, prefix))
        if time.monotonic() > deadline:
            raise RunError(_late(missing, limit))
        time.sleep(BEAT if missing else 0)
    store.set(f"penstock/all/{prefix}", "")
    return prefix


def stand_by(store: Any, rank: int) -> int:
    """Wait, as a process for which the layout of this attempt has no place, until the run has ended; the exit code.

    Where a rank fails, or a host is back, torchrun starts this process again, perhaps with a place.
    """
    try:
        while not store.check([ENDED]):
            time.sleep(STAND_BY_BEAT)
        store.set(_gone(rank), "")
    except DistError as error:
        raise RunError(f"rank {rank} stood by, and the store of the run is gone") from error
    return 0


def let_go(store: Any, ranks: Iterable[int]) -> None:
    """Let those go that stand by: the run has ended well."""
    names = [_gone(rank) for rank in ranks]
    with suppress(DistError):  # one that is lost is not waited for, and the store may be gone with it
        store.set(ENDED, "")
        store.wait(names, LET_GO)


def _gone(rank: int) -> str:
    return f"penstock/gone/{rank}"


LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """One agent, one host, any number of attempts; all attempts share the store, see `attempts`."""

    use_agent_store = True  # ranks connect to it and need none of their own

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            listener.listen(128)
            port = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self._place = RendezvousStoreInfo(LOOPBACK, port)

    def get_backend(self) -> str:
        return "penstock-local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin an attempt; there is nobody to wait for."""
        assert self._store is not None
        return RendezvousInfo(HashStore(), 0, 1, self._place)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        """Return what tells this run from others in torch's logs."""
        return self._run_id

    def shutdown(self) -> bool:
        self._closed, self._store = True, None
        return True
