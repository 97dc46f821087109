"""Loaded first of all by the server that ranks are forked from, and by nothing else: it ends with the launcher.

A fork server that saw the launcher go would still clean up for a second or more, and ranks that cannot see it
themselves (stopped, or deep in a call that holds Python's lock) end only with the server. So it must not end before
the launcher either: `timeout`, a terminal that closes and batch systems signal all processes of a run, and the
launcher answers for all.
"""

from __future__ import annotations

import signal

from penstock.train.launch.parent import die_with_parent

die_with_parent()
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
