"""Runs functions on the pretended device, in processes of their own.

    outcome = on_device(function, *arguments)                  one process, eight devices
    outcomes = on_ranks(2, function, *arguments)               processes of a group with NCCL's rules, a device each
    outcomes = attempt(2, function, *arguments, grouped=True)  the same, where an error is what is expected

`name="cuda"` puts the device in CUDA's place; `eager=True` gives `device_id=` to the group. The function stands at the
top of a test file, or is named as "module:function" where only a process with the device may load its module, and
returns what `torch.save` takes: move tensors to the CPU. Processes are forked from
a server for each name, which lives as long as the run of the tests: a case costs what it runs.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import servers
from accelerator import build

NAMES = ("pretend", "cuda")
LIMIT = 60.0  # seconds of a case


@dataclass
class Outcome:
    """What a rank returned, what the device found, and how the rank ended where it did not return."""

    value: Any = None
    error: str = ""  # a traceback, or how it ended
    code: int = 0  # of the process; negative: the signal that ended it
    stderr: str = ""
    races: list[str] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of kernels, late
    deadlocks: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    side_by_side: list[tuple[str, str]] = field(default_factory=list)  # collectives in launch order, nothing between


def on_device(function: Callable[..., Any] | str, *arguments: Any, **options: Any) -> Outcome:
    """Run a function on one process; an error there is raised here."""
    return _checked(attempt(1, function, *arguments, **options))[0]


def on_ranks(ranks: int, function: Callable[..., Any] | str, *arguments: Any, **options: Any) -> list[Outcome]:
    """Run a function on each rank of a group with NCCL's rules; an error there is raised here."""
    return _checked(attempt(ranks, function, *arguments, grouped=True, **options))


def attempt(
    ranks: int,
    function: Callable[..., Any] | str,
    *arguments: Any,
    name: str = "pretend",
    grouped: bool = False,
    eager: bool = False,
    timeout: float = 30.0,
    limit: float = LIMIT,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run a function on each rank, and return what came of it."""
    import torch

    packed = io.BytesIO()
    torch.save(arguments, packed)
    server = _server(name)
    server.send(
        {
            "ranks": ranks,
            "limit": limit,
            "function": function if isinstance(function, str) else (function.__code__.co_filename, function.__name__),
            "arguments": packed.getvalue(),
            "grouped": grouped,
            "eager": eager,
            "timeout": timeout,
            "environment": environment or {},
        }
    )
    return [_outcome(answer) for answer in server.recv()]


def order_conflicts(outcomes: list[Outcome]) -> set[frozenset[str]]:
    """Return pairs of collectives that may run at the same time and that two ranks launch in different orders."""
    launched = {pair for each in outcomes for pair in each.side_by_side}
    return {frozenset(pair) for pair in launched if pair[::-1] in launched}


def require_device() -> None:
    """Build the device where it is not built; skip the test, by name, where that cannot be done, but never in CI."""
    try:
        build.built()
    except build.CannotBuildError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def _outcome(answer: dict[str, Any]) -> Outcome:
    import torch

    value = torch.load(io.BytesIO(answer["value"]), weights_only=False) if "value" in answer else None
    found = {
        kind: [f"{text}\n    at {place}" for text, place in all_of_it]
        for kind, all_of_it in answer.get("findings", {}).items()
    }
    rest = {each: answer[each] for each in ("error", "code", "stderr", "counts", "side_by_side") if each in answer}
    return Outcome(value=value, **found, **rest)


def _checked(outcomes: list[Outcome]) -> list[Outcome]:
    wrong = [
        f"--- rank {rank}: {each.error}\nexit code {each.code}\n{each.stderr[-3000:]}"
        for rank, each in enumerate(outcomes)
        if each.error
    ]
    if wrong:
        raise AssertionError("\n".join(wrong))
    return outcomes


@cache
def _server(name: str) -> Connection:
    """Connect to the server of a name, which all workers of a run share; start it where none has."""
    require_device()
    address = str(servers.folder() / f"accelerator-{name}")
    with servers.alone():
        if not os.path.exists(address):
            subprocess.run(
                [sys.executable, "-W", "ignore", str(Path(__file__).with_name("server.py")), address],
                stdin=servers.life()[0],
                env={**os.environ, "PRETEND_NAME": name, "OMP_NUM_THREADS": "1"},
                check=True,
            )
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(address)
        return Connection(ours.detach())
