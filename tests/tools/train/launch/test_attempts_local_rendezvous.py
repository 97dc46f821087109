"""The store of a run on one host, which every user of the host reaches, and what the launcher keeps out of it."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from penstock.tools.train.launch.attempts import LOOPBACK, LocalRendezvous


def test_what_the_agent_tells_itself_is_in_no_store_that_others_reach() -> None:
    """Its numbers of ranks were: garbage there ended the launcher with torch's own traceback, and forged ones held."""
    rendezvous = LocalRendezvous("run")
    for attempt in range(2):  # each with a store of its own
        info = rendezvous.next_rendezvous()
        port = info.bootstrap_store_info.master_port
        stranger = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
        before = stranger.list_keys()
        assert not info.store.check(["ranks"])
        info.store.multi_set(["ranks"], [str(attempt)])
        assert info.store.multi_get(["ranks"]) == [str(attempt).encode()]
        assert stranger.list_keys() == before
    rendezvous.shutdown()
