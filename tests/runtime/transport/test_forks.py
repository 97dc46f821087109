"""A process that is forked off a rank closes the rank's connections and knows that it is not the rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, socket
from penstock.runtime.transport.forks import EPOCH, close_in_forks

here, there = socket.socketpair()
close_in_forks(here)
told, tell = os.pipe()
child = os.fork()
if child == 0:
    os.write(tell, f"{EPOCH[0]} {here.fileno()}".encode())
    os._exit(0)
os.waitpid(child, 0)
assert os.read(told, 100) == b"1 -1"  # one fork away, with the socket closed
assert EPOCH[0] == 0 and here.fileno() >= 0  # and nothing of it happened here
here.close()
assert there.recv(1) == b""  # no copy keeps the connection open
"""


@pytest.mark.slow
def test_a_fork_keeps_no_connection_open() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
