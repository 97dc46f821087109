"""Run one scenario on every rank, on threads or on processes, and hand back what each had to say.

A scenario is a function `scenario(transport, **options)` at the top of a test file.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from deadlines import TIMEOUT
from processes import LIMIT, SECRET, launch, loaded

from penstock.errors import PeerFailure


@dataclass
class Outcome:
    """How a rank ended: with a value, with an error, or without a word."""

    value: Any = None
    error: BaseException | None = None
    silent: bool = False
    exit_code: int | None = None

    def get(self) -> Any:
        assert not self.silent, f"this rank died or hung (exit code {self.exit_code})"
        if self.error is not None:
            raise self.error
        return self.value


def run(kind: str, scenario: Any, ranks: int = 2, timeout: float = TIMEOUT, **options: Any) -> list[Outcome]:
    """The outcomes by rank. `kind` is one of `transports.KINDS`; "-tcp" after it: its store."""
    if kind.startswith("threads"):
        return _run_threads(scenario, ranks, timeout, 0 if kind.endswith("-0") else None, options)
    return _run_processes(kind, scenario, ranks, timeout, options)


def values(outcomes: list[Outcome]) -> list[Any]:
    """What all ranks returned; raises the first error."""
    return [outcome.get() for outcome in outcomes]


def _run_threads(
    scenario: Any, ranks: int, timeout: float, capacity: int | None, options: dict[str, Any]
) -> list[Outcome]:
    from penstock.runtime.transport import ThreadTransport

    group = ThreadTransport.group(ranks, capacity=capacity, timeout=timeout)
    outcomes = [Outcome(silent=True) for _ in range(ranks)]

    def work(rank: int) -> None:
        try:
            outcomes[rank] = Outcome(value=scenario(group[rank], **options))
        except BaseException as error:
            outcomes[rank] = Outcome(error=error)
            group[rank].abort(PeerFailure(rank, f"the scenario failed: {error!r}"))
        group[rank].close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return outcomes


def _run_processes(kind: str, scenario: Any, ranks: int, timeout: float, options: dict[str, Any]) -> list[Outcome]:
    job = (kind, sys.modules[scenario.__module__].__file__, scenario.__name__, timeout, options)
    endings = launch(ranks, _on_process, *job, tcp=kind.endswith("-tcp"), limit=LIMIT)
    return [
        Outcome(*ending.said[0], exit_code=ending.code) if ending.said else Outcome(silent=True, exit_code=ending.code)
        for ending in endings
    ]


def _on_process(say: Any, kind: str, file: str, name: str, timeout: float, options: dict[str, Any]) -> None:
    """What a process runs; it says (value, error)."""
    import torch.distributed as dist

    from penstock.parallel.group.world import ON_PROCESSES

    os.environ.setdefault("PENSTOCK_SECRET", SECRET)
    scenario = loaded(file, name)
    transport = ON_PROCESSES[kind.removesuffix("-tcp")](timeout=timeout)
    value, error = None, None
    try:
        value = scenario(transport, **options)
    except BaseException as raised:
        error = raised
        transport.abort(PeerFailure(dist.get_rank(), f"the scenario failed: {error!r}"))
    transport.close()
    dist.destroy_process_group()
    try:
        say((value, error))
    except Exception:
        say((None, RuntimeError(f"{type(error).__name__}: {error}")))
