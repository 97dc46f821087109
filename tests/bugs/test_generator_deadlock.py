"""Two ranks that are threads asked torch for the state of its generator at the same moment, and neither came back.

torch holds the generator's lock while it makes the tensor with the state, and making it may collect garbage. A
finalizer that this ran let another thread go on, which asked for the state too: it waited for torch's lock and kept
Python's.
Seen once in thousands of runs of a test on threads, on a busy machine; no timeout ends it, because no thread of Python
can run any more.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
from processes import on_processes

from penstock.model.random_states import random_state, restore_random, seed_torch


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def ask_from_two_threads(ways: str) -> int:
    """Both threads ask until the collector has come by fifty times, in either of them and anywhere."""
    state, left, done = random_state(), [50], []
    actions = {"ask": random_state, "set": lambda: restore_random(state), "seed": lambda: seed_torch(3)}

    def let_others_run() -> None:
        time.sleep(0.02)
        left[0] -= 1
        weakref.finalize(Ring(), let_others_run)

    def ask(way: str) -> None:
        while left[0] > 0:
            actions[way]()
        done.append(way)

    threads = [threading.Thread(target=ask, args=(way,)) for way in ways.split()]
    gc.set_threshold(1)
    weakref.finalize(Ring(), let_others_run)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.disable()
    return len(done)


@pytest.mark.parametrize("ways", ["ask ask", "ask set", "ask seed"])
def test_threads_that_ask_for_the_state_of_the_generator_come_back(ways: str) -> None:
    assert on_processes(1, ask_from_two_threads, ways, limit=60.0) == [2]
