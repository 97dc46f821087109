"""Bugs at the end of a program, when Python shuts down beside threads that still run."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from deadlines import TIMEOUT

from penstock.runtime.transport.failure.watch import Watch

SOURCES = Path(__file__).parents[2] / "src"
SECONDS = 120  # bounds a program that hangs

# A program whose shutdown takes long, so that a thread comes back from C++ in the middle of it.
SLOW_SHUTDOWN = """
import sys, time

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep({seconds})

sys.slow = Slow()  # freed when modules are cleared, which is after the interpreter has begun to end threads
"""

# Its only question to the store takes 1.8 s inside C++, and comes back by an error.
LEFT_IN_STORE = """
import datetime, sys, threading, weakref
import torch.distributed as dist
from penstock.runtime.messages.store import Asker, NoAnswer

class Transport:
    pass

store = dist.HashStore()
store.set_timeout(datetime.timedelta(seconds=1.8))
asker = Asker(store, "store")
transport = Transport()
weakref.finalize(transport, asker.stop)  # as a transport's: the user never closes it
try:
    asker.ask("get", "never set", patience=0.1, give_up=lambda seconds: True)
except NoAnswer:
    pass
"""

# The forward of the second rank is inside C++ for as long; the first rank gives up waiting, and the step is left.
LEFT_IN_FORWARD = """
import datetime, sys
import torch
import torch.distributed as dist
from torch import nn
import penstock.errors
from penstock.runtime.engine import rank_threads

rank_threads.GRACE = 0.1
store = dist.HashStore()
store.set_timeout(datetime.timedelta(seconds=1.8))

class Stuck(nn.Linear):
    def forward(self, x):
        store.get("never set")

pipe = penstock.Pipeline(
    [nn.Linear(2, 2), Stuck(2, 2)], microbatches=2, ranks=2, transport="threads", loss_fn=nn.functional.mse_loss,
    timeout=0.3,
)
try:
    pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
except penstock.errors.PeerFailure:
    pass
"""

ENDINGS = {"the end": ("", 0), "sys.exit": ("sys.exit(3)", 3), "an error": ("raise ValueError('of the user')", 1)}


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "ending"),
    [*((LEFT_IN_STORE, ending) for ending in ENDINGS), (LEFT_IN_FORWARD, "the end")],
    ids=[*(f"store, {ending}" for ending in ENDINGS), "forward"],
)
def test_a_thread_inside_c_plus_plus_does_not_abort_a_program_that_ends(left: str, ending: str) -> None:
    """A run of 27 pipelines once ended with "terminate called without an active exception" and SIGABRT.

    The thread that asks the store is a daemon, and closing gave up on it after a second. Python ends a daemon that
    asks for the interpreter's lock during the shutdown by unwinding its stack; frames of C++ that must not be unwound,
    as around every call of a store, make that an abort. Now the program waits for the thread before it shuts down. The
    same could happen to a rank that is a thread, and was still in the model's code when a step had failed.
    """
    code, expected = ENDINGS[ending]
    found = run(left + SLOW_SHUTDOWN.format(seconds=3) + code)
    assert "terminate" not in found.stderr
    assert found.returncode == expected, found.stderr


class HeldStore:
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        self.asked, self.free = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        self.free.wait(SECONDS)
        return False


def test_the_finalizer_of_a_transport_waits_for_no_thread() -> None:
    """Garbage is collected on any thread, so a transport's finalizer may run on the very thread that it ends, where it
    raised "cannot join current thread"; in a rehearsal it let virtual time pass in the middle of another rank's code.
    """
    others = {*threading.enumerate()}
    store = HeldStore()
    watch = Watch(store, None, "prefix", 0, 2, TIMEOUT, lambda peer: None)
    assert store.asked.wait(SECONDS)
    watch.stop()
    assert len({*threading.enumerate()} - others) == 2
    store.free.set()
    watch.close()
    assert not {*threading.enumerate()} - others
