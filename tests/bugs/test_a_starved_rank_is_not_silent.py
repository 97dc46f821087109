"""On a machine with a load of 50, one step took two minutes, and a rank that only lacked a processor was called dead.

A rank waited for longer than its timeout. But its own watching thread, which looks twice a second, had hardly run in
that time either: the machine was slow, and the peer was not silent.
"""

from __future__ import annotations

import time

from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.failure.watch import Watch


def watch() -> Watch:
    made = Watch(None, None, "test", 0, 1, 60.0, lambda peer: None)
    overdue = made._overdue
    overdue.in_other_group.anybody = overdue.compiling.anybody = lambda: False  # type: ignore[method-assign]  # no store
    return made


def test_who_hardly_ran_waits_for_up_to_three_timeouts() -> None:
    now = time.monotonic()
    seen, starved = watch(), watch()
    overdue = Waiting(1, None, 0, now - 61)
    assert not any(seen._overdue(overdue) for _ in range(30))
    assert seen._overdue(overdue)  # it looked as often as a machine that is merely busy lets it
    assert not starved._overdue(overdue)
    assert starved._overdue(Waiting(1, None, 0, now - 181))
    assert not seen._overdue(Waiting(1, None, 1, now - 61))  # another wait is counted anew
