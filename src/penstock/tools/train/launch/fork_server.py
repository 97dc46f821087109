"""Loaded first of all by the server that ranks are forked from, and by nothing else: it ends with the launcher.

A fork server that saw the launcher go would still clean up for a second or more, and ranks that cannot see it
themselves (stopped, or deep in a call that holds Python's lock) end only with the server. So it must not end before
the launcher either: `timeout`, a terminal that closes and batch systems signal all processes of a run, and the
launcher answers for all.

Ranks end with the server from their first moment on, so that the launcher ends them all by ending it, also those whose
start it has not seen to its end.
"""

from __future__ import annotations

import os
import signal

from penstock.tools.train.launch.stopping import die_with_parent

SERVER = os.getpid()


def _die_with_server() -> None:
    if os.getppid() == SERVER:  # a rank; what a rank forks is its own affair
        die_with_parent()
        if os.getppid() != SERVER:  # The server ended just before.
            os._exit(1)


die_with_parent()
os.register_at_fork(after_in_child=_die_with_server)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
