"""Simulated runs to look at."""

from __future__ import annotations

from penstock.schedule import Costs, build, simulate
from penstock.view.run import Run


def run(name: str, ranks: int = 4, microbatches: int = 6, **costs: float) -> Run:
    """One step of a schedule, priced."""
    return Run(name, simulate(build(name, ranks, microbatches), Costs(**costs)))
