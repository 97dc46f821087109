"""`torchrun --nproc-per-node N script.py ...` on this host, by processes that are forked from one with torch loaded.

torchrun starts a new Python for every process, each of which loads torch: seconds of work that no document is about.
The environment of the processes is torchrun's own, and the end too: when one fails, the others are stopped, and so is
this program, with 1. It is the `torchrun` of warm.py.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    size = str(given.nproc_per_node)
    os.environ.update(
        WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0", GROUP_WORLD_SIZE="1", ROLE_WORLD_SIZE=size
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PET_MASTER_PORT"])
    os.environ.update(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    children = {}
    for rank in range(given.nproc_per_node):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _run(rank, given.script, given.rest)
            return 0
        children[pid] = rank
    failed = 0
    while children:
        pid, status = os.wait()
        rank = children.pop(pid)
        if code := os.waitstatus_to_exitcode(status):
            print(f"rank {rank} ended with {code}", file=sys.stderr)
            failed = 1
            for other in children:
                os.kill(other, signal.SIGTERM)
    return failed


def _run(rank: int, script: str, rest: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), ROLE_RANK=str(rank))
    sys.argv = [script, *rest]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
