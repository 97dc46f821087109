"""A group of gloo processes that the tests of a file share: each test runs its own scenario on all of them.

    @pytest.fixture(scope="module")
    def ranks() -> Iterator[KeptProcesses]:
        with KeptProcesses(2) as kept:
            yield kept

    def test_a_promise(ranks: KeptProcesses) -> None:
        for found in ranks.run(scenario, argument):  # what each rank returned
            assert found == ...

The scenario stands at the top of the file, above its test. Where a rank fails, dies or is silent, the error is raised
in that test, and the next test has new processes: no test depends on what another one has left.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from processes import LAST_WORDS, SECRET, RankError, forking, join_group, loaded, packed, unpacked

LIMIT = 120.0  # seconds of a scenario


class KeptProcesses:
    """Processes of one group, which wait for the next function that they all run."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._found: dict[str, list[Any]] = {}

    def __enter__(self) -> KeptProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> list[Any]:
        """Return what `function(*arguments)` returned on each rank; raise if it failed on any."""
        if not self._processes:
            self._start()
        job = packed((function.__code__.co_filename, function.__name__, arguments))
        for pipe in self._pipes:
            pipe.send_bytes(job)
        answers = self._collect(time.monotonic() + limit)
        problems = [f"--- rank {rank}: {value}" for rank, (good, value) in enumerate(answers) if not good]
        if problems:
            self._end()
            raise RankError("\n".join(problems))
        return [value for _, value in answers]

    def found(self, function: Callable[..., Any]) -> list[Any]:
        """Return what a scenario returned when it was first run, for several tests that look at the same."""
        if function.__name__ not in self._found:
            self._found[function.__name__] = self.run(function)
        return self._found[function.__name__]

    def _start(self) -> None:
        context = forking()
        self._groups += 1
        place = f"file://{self._folder.name}/rendezvous-{self._groups}"
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.ranks, place, str(self._log(rank))))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _collect(self, deadline: float) -> list[tuple[bool, Any]]:
        """Return what each rank answers; when one has failed, the others have some seconds left."""
        answers: dict[Any, tuple[bool, Any]] = {}
        while (open_pipes := [pipe for pipe in self._pipes if pipe not in answers]) and time.monotonic() < deadline:
            for pipe in wait(open_pipes, 0.1):
                assert isinstance(pipe, Connection)
                try:
                    answers[pipe] = unpacked(pipe.recv_bytes())
                except (EOFError, OSError):
                    log = self._log(self._pipes.index(pipe))
                    answers[pipe] = False, f"died\n{log.read_text() if log.exists() else ''}"
                if not answers[pipe][0]:
                    deadline = min(deadline, time.monotonic() + LAST_WORDS)
        return [answers.get(pipe, (False, "gave no answer in time")) for pipe in self._pipes]

    def _end(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
            process.close()
        self._pipes, self._processes = [], []

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{self._groups}-{rank}"


def _serve(pipe: Connection, rank: int, ranks: int, place: str, log: str) -> None:
    """Run what comes, until the test closes its end."""
    join_group(rank, ranks, place, log)
    os.environ.setdefault("PENSTOCK_SECRET", SECRET)
    while True:
        try:
            file, name, arguments = unpacked(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, loaded(file, name)(*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(packed(answer))
