"""The process that has the group's store: when the store is gone or silent, that process is."""

from __future__ import annotations

from copy import copy

from penstock.errors import PeerFailure
from penstock.runtime.transport.failure.peer_failures import STORE_GONE

STORE_SECONDS = 3.0  # The store must answer within this time.


class StoreHost:
    """Where the store is, seen from one rank: `host` is the rank whose process has it, if a rank of the group has."""

    def __init__(self, host: int | None, rank: int) -> None:
        self.host = host
        self.is_here = host == rank
        self.far: PeerFailure | None = None  # what to say of a store that a process of another group has

    def gone(self) -> PeerFailure | None:
        """Return who is lost with the store, if it was in another process."""
        if self.host is None:
            return None if self.far is None else copy(self.far)
        return None if self.is_here else PeerFailure(self.host, STORE_GONE)

    def silent(self) -> PeerFailure | None:
        """Return who is silent with the store, if another rank has it."""
        if self.host is None or self.is_here:
            return None
        return PeerFailure(self.host, f"silent: the store that it hosts has not answered for {STORE_SECONDS:g} s")
