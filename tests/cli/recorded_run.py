"""The command in a folder with a recorded run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typer.testing import CliRunner

from penstock.cli import app
from penstock.schedule import Costs, Timeline, build, simulate
from penstock.schedule.timing.timeline import Wall


def save_run() -> None:
    """Save a run to this folder: 1f1b on two ranks, as if measured, with half a second outside of the pipeline."""
    priced = simulate(build("1f1b", 2, 4), Costs(forward=0.5, input=0.5, weight=0.5, hop=0.05))
    walls = tuple(Wall(-0.25, row[-1].end, priced.makespan + 0.25) for row in priced.by_rank)
    recorded(priced, walls).save("run.json")
    build("zb-h1", 2, 4).save("zb.csv")


def recorded(priced: Timeline, walls: tuple[Wall, ...]) -> Timeline:
    return replace(priced, walls=walls, unit="s", arrival=None)


def call(command: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == code, result.output
    return result


def slower(factor: float) -> Timeline:
    """The recorded run as if everything had taken so many times as long, on a machine of two cores."""
    run = Timeline.load("run.json")
    spans = tuple(
        span._replace(start=span.start * factor, end=span.end * factor, wait=span.wait * factor) for span in run.spans
    )
    walls = tuple(Wall(*(time * factor for time in wall)) for wall in run.walls)
    return replace(run, spans=spans, walls=walls, cores=1)
