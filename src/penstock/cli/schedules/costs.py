"""Costs as options: text in, `Costs` out, with the option named when it cannot be read."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from penstock.errors import UsageError
from penstock.schedule import Costs

__all__ = [
    "Activation",
    "Bandwidth",
    "Bytes",
    "Forward",
    "Hop",
    "Input",
    "Latency",
    "Weight",
    "amount",
    "amounts",
    "read_costs",
]


def _option(help: str, metavar: str = "TIME[,...]") -> Any:
    return typer.Option(metavar=metavar, help=help, show_default=False)


Forward = Annotated[str, _option("Time of F: one number, or one for each stage with commas (1).")]
Input = Annotated[str, _option("Time of I, the backward for the inputs; B takes I + W (1).")]
Weight = Annotated[str, _option("Time of W, the backward for the weights (1).")]
Hop = Annotated[str, _option("Time from a compute's end until another rank has its result (0).", "TIME")]
Latency = Annotated[str, _option("Instead of --hop: a message takes latency + bytes / bandwidth (0).", "TIME")]
Bandwidth = Annotated[str | None, _option("Bytes per unit of time on each link between two ranks.", "NUMBER")]
Bytes = Annotated[str, _option("Size of a stage's output: one number, or one for each stage.", "NUMBER[,...]")]
Activation = Annotated[
    str, _option("Memory that F takes and B or W gives back: one number, or one for each stage (1).", "NUMBER[,...]")
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


def amounts(option: str, text: str, stages: int) -> float | tuple[float, ...]:
    """One number, or one for each stage."""
    values = tuple(amount(option, part) for part in text.split(","))
    if len(values) == 1:
        return values[0]
    if len(values) != stages:
        raise UsageError(f"{option} has {len(values)} numbers for {stages} stages; give one for each, or one in all")
    return values


def read_costs(
    stages: int,
    *,
    forward: str,
    input: str,
    weight: str,
    hop: str,
    latency: str,
    bandwidth: str | None,
    bytes: str,
    activation: str,
) -> Costs:
    """The costs that the options state, for so many stages."""
    size = amounts("--bytes", bytes, stages)
    if bandwidth is None and size != 0:
        raise UsageError("--bytes needs --bandwidth: a message takes latency + bytes / bandwidth")
    return Costs(
        forward=amounts("--forward", forward, stages),
        input=amounts("--input", input, stages),
        weight=amounts("--weight", weight, stages),
        hop=amount("--hop", hop),
        latency=amount("--latency", latency),
        bandwidth=None if bandwidth is None else amount("--bandwidth", bandwidth),
        bytes=size,
        activation=amounts("--activation", activation, stages),
    )
