"""Costs as options: text in, `Costs` out, with the option named when it cannot be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from penstock.errors import UsageError
from penstock.schedule import Costs


def _option(help: str, metavar: str = "TIME[,...]") -> Any:
    return typer.Option(metavar=metavar, help=help, show_default=False)


Forward = Annotated[str, _option("Time of F: one number, or one per stage, with commas (1).")]
Input = Annotated[str, _option("Time of I, the backward for the inputs; B takes I + W (1).")]
Weight = Annotated[str, _option("Time of W, the backward for the weights (1).")]
Hop = Annotated[str, _option("Time from a compute's end until another rank has its result (0).", "TIME")]
HopTime = Annotated[str, typer.Option(metavar="TIME", help="Time from rank to rank.")]
Latency = Annotated[str, _option("Instead of --hop: a message takes latency + bytes / bandwidth (0).", "TIME")]
Bandwidth = Annotated[str | None, _option("Bytes per unit of time on each link between two ranks.", "NUMBER")]
Bytes = Annotated[str, _option("Size of a stage's output: one number, or one per stage.", "NUMBER[,...]")]
Activation = Annotated[
    str, _option("Memory that F takes and B or W gives back: one number, or one per stage (1).", "NUMBER[,...]")
]

Overlap = Annotated[
    str | None,
    _option("What an overlapped pair takes, as a share of the sum of its parts (one after the other: 1).", "SHARE"),
]


def amount(option: str, text: str) -> float:
    """One number that can be a cost."""
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{option}: {text.strip()!r} is not a number; give one such as 1.5") from None
    if not 0 <= value < math.inf:
        raise UsageError(f"{option}: {text.strip()} does not work here; give a finite number of 0 or more")
    return value


def amounts(option: str, text: str, stages: int | None = None) -> float | tuple[float, ...]:
    """One number, or several with commas: one per stage, where it is known how many there are."""
    values = tuple(amount(option, part) for part in text.split(","))
    if len(values) == 1:
        return values[0]
    if stages is not None and len(values) != stages:
        raise UsageError(
            f"{option} has {len(values)} numbers for {stages} stages; give one per stage, or a single one for all"
        )
    return values


def read_costs(stages: int, given: Mapping[str, str | None]) -> Costs:
    """The costs that the options of these names state, for so many stages."""
    found: dict[str, Any] = {}
    for name, text in given.items():
        if text is not None:
            read = amount if name in ("hop", "latency", "bandwidth", "overlap") else partial(amounts, stages=stages)
            found[name] = read(f"--{name}", text)
    if "bandwidth" not in found and found.get("bytes", 0.0) != 0:
        raise UsageError("--bytes needs --bandwidth: a message takes latency + bytes / bandwidth")
    return Costs(**found)
