"""Forward-mode differentiation in a process whose ranks are threads.

torch has one level of dual numbers for all threads of a process: one thread's tangents end with another's level, and a
second level is an error. A compute that opens one must therefore have the process to itself, as one that draws from the
process's generator has. Which computes do is found out in the same way (`randomness.ThreadRandomness`): the first
forward of each stage runs alone, and what it has needed all others of the stage get.
"""

from __future__ import annotations

from functools import wraps

from torch.autograd import forward_ad

from penstock.runtime.state.randomness import needs_to_be_alone


def notice_dual_levels() -> None:
    """Have every level that a compute opens noticed, from here on in this process."""
    enter = forward_ad.enter_dual_level
    if hasattr(enter, "__wrapped__"):
        return

    @wraps(enter)
    def enter_dual_level() -> int:
        needs_to_be_alone("opens a level of forward-mode differentiation, of which a process has one")
        level: int = enter()  # type: ignore[no-untyped-call]
        return level

    forward_ad.enter_dual_level = enter_dual_level
