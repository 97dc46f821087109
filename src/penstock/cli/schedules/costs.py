"""Costs as options: text in, `Costs` out, with the option named when it cannot be read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.errors import UsageError
from penstock.schedule import Costs

ONE_FOR_ALL = ("hop", "latency", "bandwidth", "overlap")  # costs of which there is one, whatever the stages


def _option(help: str, metavar: str = "TIME[,...]", show_default: bool = False) -> Any:
    return typer.Option(metavar=metavar, help=help, show_default=show_default)


class _StatedCosts:
    def read(self, stages: int | None = None) -> Costs:
        """Read the costs that the options state, of so many stages if that is known."""
        found: dict[str, Any] = {}
        for name, text in vars(self).items():
            if text is not None:
                option = f"--{name}"
                found[name] = amount(option, text) if name in ONE_FOR_ALL else amounts(option, text, stages)
        if "bandwidth" not in found and found.get("bytes", 0.0) != 0:
            raise UsageError("--bytes needs --bandwidth: a message takes latency + bytes / bandwidth")
        return Costs(**found)


@dataclass(frozen=True)
class TimeOptions(_StatedCosts):
    """Times of a stage's computes, and of a hop, as the options of a command state them."""

    forward: Annotated[str, _option("Time of F: one number, or one per stage, with commas (1).")] = "1"
    input: Annotated[str, _option("Time of I, the backward for the inputs; B takes I + W (1).")] = "1"
    weight: Annotated[str, _option("Time of W, the backward for the weights (1).")] = "1"
    hop: Annotated[str, _option("Time from a compute's end until another rank has its result (0).", "TIME")] = "0"


@dataclass(frozen=True)
class TravelOptions(TimeOptions):
    """Also what messages take, and overlapped pairs."""

    latency: Annotated[str, _option("Instead of --hop: a message takes latency + bytes / bandwidth (0).", "TIME")] = "0"
    bandwidth: Annotated[str | None, _option("Bytes per unit of time on each link between two ranks.", "NUMBER")] = None
    bytes: Annotated[str, _option("Size of a stage's output: one number, or one per stage.", "NUMBER[,...]")] = "0"
    overlap: Annotated[
        str | None,
        _option("What an overlapped pair takes, as a share of the sum of its parts (one after the other: 1).", "SHARE"),
    ] = None


@dataclass(frozen=True)
class CostOptions(TravelOptions):
    """Also the memory that a microbatch takes."""

    activation: Annotated[
        str, _option("Memory that F takes and B or W gives back: one number, or one per stage (1).", "NUMBER[,...]")
    ] = "1"


_RankTime = Annotated[str, _option("Time for all stages of a rank together.", "TIME", show_default=True)]


@dataclass(frozen=True)
class RankTimeOptions(_StatedCosts):
    """Times of a rank with all of its stages, so that they mean the same however many stages it has."""

    forward: _RankTime = "1"
    input: _RankTime = "1"
    weight: _RankTime = "1"
    hop: Annotated[str, _option("Time from rank to rank.", "TIME", show_default=True)] = "0"


def amount(option: str, text: str) -> float:
    """Read one number that can be a cost."""
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{option}: {text.strip()!r} is not a number; give one such as 1.5") from None
    if not 0 <= value < math.inf:
        raise UsageError(f"{option}: {text.strip()} does not work here; give a finite number of 0 or more")
    return value


def amounts(option: str, text: str, stages: int | None = None) -> float | tuple[float, ...]:
    """Read one number, or several with commas: one per stage, where it is known how many there are."""
    values = tuple(amount(option, part) for part in text.split(","))
    if len(values) == 1:
        return values[0]
    if stages is not None and len(values) != stages:
        raise UsageError(
            f"{option} has {len(values)} numbers for {stages} stages; give one per stage, or a single one for all"
        )
    return values
