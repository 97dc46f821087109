"""Processes that run checks together, and a parent that waits for none of them longer than a limit.

A check is a function that every rank calls with its `Place`. A rank that raises, dies or is silent is a finding: all
ranks are ended, and the next check begins with new ones. So one check that hangs, as a wrong order of messages does on
NCCL, costs its own time limit and takes nothing else with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.devices import backends

START = 120.0  # seconds for processes to load torch and to find each other
SETTLE = 3.0  # seconds in which other ranks may still answer once one has failed
TAIL = 2_000  # characters of what a rank wrote, in a report


@dataclass(frozen=True)
class Place:
    """Where a check runs.

    Attributes:
        rank: This process's number.
        world: How many there are.
        device: The device of this rank.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def options(self) -> dict[str, Any]:
        """The arguments by which a `Pipeline` uses these devices."""
        return {} if self.device.type == "cpu" else {"devices": "auto"}


Check = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Answers:
    """What came of one check.

    Attributes:
        figures: What the check returned, by rank; of a rank that did not return, nothing.
        errors: What ranks raised, by rank: the last line, and the traceback.
        missing: Ranks that did not answer, with how they ended.
        seconds: How long it took.
        written: The end of what those ranks wrote that failed.
    """

    figures: dict[int, dict[str, Any]] = field(default_factory=dict)
    errors: dict[int, tuple[str, str]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    written: str = ""

    @property
    def complaint(self) -> str:
        """What went wrong, in one line; nothing where all ranks returned."""
        for rank, (line, _) in sorted(self.errors.items()):
            return f"rank {rank}: {line}"
        return "; ".join(f"rank {rank} {how}" for rank, how in sorted(self.missing.items()))

    @property
    def details(self) -> str:
        """Everything that is known about what went wrong."""
        texts = [f"rank {rank}:\n{text}" for rank, (_, text) in sorted(self.errors.items())]
        texts += [f"rank {rank} {how}" for rank, how in sorted(self.missing.items())]
        return "\n".join([*texts, self.written] if self.written else texts)


class RankGroup:
    """As many processes as asked for, one device each, in one process group.

    Args:
        world: How many processes.
        kind: The kind of their devices.
        bound: Whether the group is made with `device_id=`, which connects all ranks at once, and by one communicator.
    """

    def __init__(self, world: int, kind: str, bound: bool = False) -> None:
        self.world, self.kind, self.bound = world, kind, bound
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-doctor-")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._starts = 0

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def run(self, check: Check, *arguments: Any, limit: float) -> Answers:
        """Run a check on all ranks and return what came of it within `limit` seconds."""
        if not self._processes:
            answers = self._start()
            if answers.complaint:
                self._end()
                return answers
        for pipe in self._pipes:
            pipe.send((check, arguments))
        answers = self._collect(limit)
        if answers.complaint:
            self._end()
        return answers

    def _start(self) -> Answers:
        context = multiprocessing.get_context("spawn")
        self._starts += 1
        meeting = str(self._path(f"meeting-{self._starts}"))
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.world, self.kind, self.bound, meeting, str(self._log(rank)))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return self._collect(START)

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def _log(self, rank: int) -> Path:
        return self._path(f"rank-{rank}-{self._starts}.txt")

    def _collect(self, limit: float) -> Answers:
        begin = time.monotonic()
        deadline = begin + limit
        answers = Answers()
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    kind, *found = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(SETTLE)
                    answers.missing[rank] = _ending(self._processes[rank].exitcode)
                else:
                    if kind == "done":
                        answers.figures[rank] = found[0]
                        continue
                    answers.errors[rank] = (found[0], found[1])
                deadline = min(deadline, time.monotonic() + SETTLE)
        hung = time.monotonic() - begin >= limit
        for rank in waiting.values():
            answers.missing[rank] = f"gave no answer within {limit:.0f} s" if hung else "was still waiting"
        failed = sorted({*answers.errors, *answers.missing})
        written = "\n".join(text for rank in failed if (text := self._written(rank)))
        return Answers(answers.figures, answers.errors, answers.missing, time.monotonic() - begin, written)

    def _written(self, rank: int) -> str:
        log = self._log(rank)
        text = log.read_text(errors="replace").strip() if log.exists() else ""
        return f"rank {rank} wrote:\n{text[-TAIL:]}" if text else ""

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _ending(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _serve(pipe: Connection, rank: int, world: int, kind: str, bound: bool, meeting: str, log: str) -> None:
    """Run checks as one rank, until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C, and ends its ranks
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):  # what libraries in C write, too
        os.dup2(output, stream)
    try:
        place = _join(rank, world, kind, bound, meeting)
        pipe.send(("done", {}))
        while True:
            check, arguments = pipe.recv()
            pipe.send(("done", check(place, *arguments)))
    except EOFError:  # the parent is done
        os._exit(0)
    except Exception as error:  # whatever it is, the parent reports it
        pipe.send(("failed", f"{type(error).__name__}: {str(error).strip()}".splitlines()[0], traceback.format_exc()))


def _join(rank: int, world: int, kind: str, bound: bool, meeting: str) -> Place:
    if kind == "cpu":
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    else:
        torch.accelerator.set_device_index(rank)
        device = torch.device(kind, rank)
    dist.init_process_group(
        backends(),
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=START),
        device_id=device if bound else None,
    )
    return Place(rank, world, device)
