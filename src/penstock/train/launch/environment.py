"""What torch reads from the environment when it is loaded, and the training command wants otherwise than by default."""

from __future__ import annotations

import os

WANTED = {
    # At the end of every operation threads wait for each other, by default in a loop that keeps the core. Where another
    # process has the core that the last of them needs, an operation of microseconds takes a time slice: measured on two
    # busy cores, a small step took 25 times the CPU and 15 times the time. Asleep, they cost what one thread costs.
    "OMP_WAIT_POLICY": "PASSIVE",
    # The memory of a run is counted from its first step on, and torch's allocator would warn of each older block.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def prepare_environment() -> None:
    """Set what the user has not set; to be called before torch is loaded, here or in the ranks."""
    for name, value in WANTED.items():
        os.environ.setdefault(name, value)
