"""Where the ranks of one host meet: a store that listens on the loopback address only.

torch's own rendezvous listens on all interfaces, also for a run that never leaves its host, and nobody who connects to
a store has to prove anything. So here the socket is made first, bound to 127.0.0.1, and the store is given that. What
the one agent tells itself (how many ranks there are, and which) stays in its own memory, where no other user of the
host can write.
"""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

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
