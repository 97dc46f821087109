"""Gloo's own threads, kept from taking the core of the thread that computes.

Every connection of gloo has a loop thread in this process, which each packet wakes. Where all cores are busy, the
kernel gives it the core of a thread that computes, at once: mostly that of the main thread, and often in the middle of
a write, whose lock the loop thread then polls for. That costs a rank with small messages more than the messages do.

`SCHED_BATCH` keeps a thread from taking a core from others when it wakes. It runs at once where a core is free, as one
is where a main thread waits for a message; else when somebody gives way, or at the scheduler's next tick. So `give_way`
belongs before a send, so that gloo knows which receives are announced, and after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAME = "gloo_tcp_loop"  # what gloo calls them


def loop_threads() -> list[int]:
    """Return the loop threads of this process, by their number; none where the system does not show them."""
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # The thread has just ended.
            if (task / "comm").read_text().strip() == NAME:
                found.append(int(task.name))
    return found


def hold_back_loop_threads() -> Callable[[], None] | None:
    """Keep all loop threads from taking cores from others; returns `give_way`, or None where there is none held back.

    A thread to which somebody has given another policy keeps that.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return None
    held_back = False
    for thread in loop_threads():
        with suppress(OSError):  # The thread has just ended, or this is not permitted.
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            held_back |= os.sched_getscheduler(thread) == os.SCHED_BATCH
    return os.sched_yield if held_back else None
