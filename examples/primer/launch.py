"""What the programs share: start the processes of one gloo group, and print what they say in order. Nothing else."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

START = "fork" if sys.platform == "linux" else "spawn"  # fork: the children have torch loaded already
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # all processes are on this machine
PATIENCE = timedelta(seconds=20)  # then a rank that waits for a message gives up, and says so
LOST = ("closed by peer", "reset by peer", "Broken pipe")  # a rank that says so has lost another, which is to blame


def run(program, ranks=4, allowed=range(1, 17)):
    """`program(rank, ranks)` in that many processes; `python NN_name.py 3` starts 3 instead."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.exit("start it with plain python: it starts its own processes")
    if len(sys.argv) > 1:
        if not (sys.argv[1].isdecimal() and int(sys.argv[1]) in allowed):
            sys.exit(f"{sys.argv[1]} ranks cannot run it; take one of {', '.join(map(str, allowed))}")
        ranks = int(sys.argv[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in an orderly way: the children end too
    context = multiprocessing.get_context(START)
    ends = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:  # where the processes find each other
        places = [(program, rank, ranks, f"file://{folder}/meeting", ends) for rank in range(ranks)]
        jobs = [context.Process(target=_enter, args=place) for place in places]
        try:
            for job in jobs:
                job.start()
            running = jobs
            while running and not any(job.exitcode for job in jobs):
                wait([job.sentinel for job in running])
                running = [job for job in running if job.exitcode is None]
            for job in running:
                job.join(2)  # it may have something to say about the one that failed
            codes = [job.exitcode for job in jobs]
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            for job in jobs:
                if job.is_alive():
                    job.terminate()  # it still waits for one that has failed
                    job.join()
    told = []
    while not ends.empty():
        told.append(ends.get())
    if complaint := _blame(codes, told):
        sys.exit(complaint)


def _enter(program, rank, ranks, place, ends):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent ends the others
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_follow, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks, timeout=PATIENCE)
        program(rank, ranks)
        dist.destroy_process_group()
    except (Exception, SystemExit) as error:  # the parent prints it
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == program.__code__.co_filename]
        where = f"line {own[-1].lineno}: {own[-1].line}" if own else "its start"
        text = traceback.format_exc()[-8000:]  # a pipe holds 64 KiB, and the parent reads at the end
        ends.put((time.time(), rank, where, text))
        sys.exit(1)
    ends.put((time.time(), rank, "", ""))


def _follow(parent):
    parent.join()
    os._exit(1)  # nobody is left to end this rank, which might wait for others


def _blame(codes, told):
    """Whose fault it was: a rank that vanished, else the first that failed and had not lost another."""
    known = {rank for _, rank, _, _ in told}
    failed = sorted((any(sign in text for sign in LOST), *rest, text) for *rest, text in told if text)
    at = sorted((rank, f"rank {rank} was then at {where}") for _, _, rank, where, _ in failed)
    for rank, code in enumerate(codes):
        if code is not None and rank not in known:
            how = f"was killed by signal {-code}" if code < 0 else f"left with exit code {code} before its end"
            return "\n".join([f"rank {rank} {how}", *(line for _, line in at)])
    if not failed:
        return ""
    _, _, blamed, _, text = failed[0]
    return "\n".join([f"rank {blamed} failed:\n{text}", *(line for rank, line in at if rank != blamed)])


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
            try:
                print(f"{text}\n", end="", flush=True)  # a whole line or none, even if this rank is ended now
            except BrokenPipeError:  # who read it (`| head`) has seen enough
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def to_others(what):
    """For `say`: that this rank sends something to all others. One rank alone has nobody to send to."""
    others = [str(other) for other in range(dist.get_world_size()) if other != dist.get_rank()]
    return [f"rank {dist.get_rank()} -> rank {', '.join(others)}: {what}"] if others else []
