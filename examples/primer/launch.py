"""What the programs share: start the processes of one gloo group, and print what they say in order. Nothing else."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

START = "fork" if sys.platform == "linux" else "spawn"  # fork: the children have torch loaded already
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # all processes are on this machine
PATIENCE = timedelta(seconds=20)  # then a rank that waits for a message gives up, and says so


def run(program, ranks=4):
    """`program(rank, ranks)` in that many processes; `python NN_name.py 3` starts 3 instead."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.exit("start it with plain python: it starts its own processes")
    if len(sys.argv) > 1:
        if not (sys.argv[1].isdecimal() and 1 <= int(sys.argv[1]) <= 16):
            sys.exit(f"{sys.argv[1]!r}: give the number of ranks, from 1 to 16")
        ranks = int(sys.argv[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    context = multiprocessing.get_context(START)
    errors = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:  # where the processes find each other
        jobs = [
            context.Process(target=_enter, args=(program, rank, ranks, f"file://{folder}/meeting", errors))
            for rank in range(ranks)
        ]
        for job in jobs:
            job.start()
        running = jobs
        while running and not any(job.exitcode for job in jobs):
            wait([job.sentinel for job in running])
            running = [job for job in running if job.exitcode is None]
        for job in running:
            job.join(2)
        killed = [rank for rank, job in enumerate(jobs) if (job.exitcode or 0) < 0]
        for job in running:
            job.terminate()  # it still waits for one that has failed
            job.join()
    told = []
    while not errors.empty():
        told.append(errors.get())
    if killed:
        sys.exit(f"rank {killed[0]} was killed: exit code {jobs[killed[0]].exitcode}")
    if told:  # the first; but one that lost its peer did so because of another
        sys.exit(min(told, key=lambda error: ("closed by peer" in error[1], error[0]))[1])


def _enter(program, rank, ranks, place, errors):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=PATIENCE)
        program(rank, ranks)
        dist.destroy_process_group()
    except (Exception, SystemExit):  # the parent prints the first
        errors.put((time.time(), f"rank {rank} failed:\n{traceback.format_exc()}"))
        sys.exit(1)


def say(*lines):
    """Every rank's lines, printed by rank 0 in the order of ranks; what all ranks say alike, once.

    All ranks must call it. A line may be `(time, text)`: earlier times are printed first.
    """
    told = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(lines, told)
    if told is not None:
        told = told[:1] if all(lines == told[0] for lines in told) else told
        timed = [line if isinstance(line, tuple) else (0, line) for lines in told for line in lines]
        for _, text in sorted(timed, key=lambda line: line[0]):
            print(text, flush=True)
