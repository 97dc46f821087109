"""Where a command's schedule comes from: a family's name and sizes, or a file.

With a name, the sizes say what to build. With a file, they say what the file must be for; a
file that is for something else is refused as any other wrong file is.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from penstock.errors import Fault, ScheduleError, UsageError
from penstock.schedule import FAMILIES, Schedule, build, family, verify
from penstock.schedule.builders import is_auto
from penstock.schedule.columns import check_size
from penstock.view.figures import counted
from penstock.view.run import sizes_of

SUFFIXES = (".csv", ".json")
MOST_SEARCHED = 4  # stages per rank that "auto" tries
RANKS = 4  # A name that comes without sizes has these.
FILE = "A file that is for another number is refused."
MOST_COMPUTES = 15_000_000  # minutes and gigabytes; more than that is a slip of the keyboard


def whole(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers of at least `least`, for an option."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a whole number; give one such as {max(least, 4)}") from None
        if value < least:
            raise typer.BadParameter(f"{value} is too small; give {least} or more")
        return value

    return number


def option(help: str, *names: str, **more: Any) -> Any:
    """Make an option; it is called as its parameter unless names are given."""
    return typer.Option(*names, help=help, **more)


def count(help: str, *names: str, least: int = 1, metavar: str = "N") -> Any:
    """Make an option that is a whole number of at least `least`."""
    return option(help, *names, parser=whole(least), metavar=metavar)


def complete_source(incomplete: str) -> list[str]:
    """Complete families for the shell, which knows files by itself."""
    return [name for name in FAMILIES if name.startswith(incomplete.lower())]


Source = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help=f"A family ({', '.join(FAMILIES)}) or a file that ends in .csv or .json.",
        show_default=False,
        autocompletion=complete_source,
    ),
]
AsJson = Annotated[bool, option("Print JSON, for programs.", "--json")]
Steps = Annotated[int, count("Steps that ranks run back to back, without waiting for each other in between.")]


@dataclass(frozen=True)
class BatchSizes:
    """Between how many ranks a batch goes, in how many slices."""

    ranks: Annotated[int | None, count(f"Workers of the pipeline (default: {RANKS}). {FILE}", "--ranks", "-r")] = None
    microbatches: Annotated[
        int | None, count(f"Slices of the batch (default: twice the ranks). {FILE}", "--microbatches", "-m")
    ] = None

    def filled(self) -> tuple[int, int]:
        """Return ranks and microbatches; where they were not given, a few."""
        ranks = RANKS if self.ranks is None else self.ranks
        return ranks, 2 * ranks if self.microbatches is None else self.microbatches


@dataclass(frozen=True)
class Sizes(BatchSizes):
    """How large a schedule is to be, or what a file must be for."""

    stages_per_rank: Annotated[
        int | None, count("Stages on each rank (default: the family's).", "--stages-per-rank", "-v")
    ] = None

    def or_those_of(self, schedule: Schedule) -> Self:
        """Take the ranks and microbatches of a schedule, where none were given."""
        return replace(
            self, ranks=self.ranks or schedule.ranks, microbatches=self.microbatches or schedule.microbatches
        )


def is_file(source: str) -> bool:
    """Return whether a file is meant: its ending or a folder shows it, or that it exists."""
    path = Path(source)
    return path.suffix.lower() in SUFFIXES or os.sep in source or (path.is_file() and not _is_family(source))


def _is_family(source: str) -> bool:
    with suppress(UsageError):
        return is_auto(source) or bool(family(source))
    return False


def read(source: str, sizes: Sizes) -> Schedule:
    """Read the schedule that the arguments mean, not yet proved."""
    if is_file(source):
        return _load(source, sizes)
    (ranks, microbatches), stages_per_rank = sizes.filled(), sizes.stages_per_rank
    if is_auto(source):
        check_size(ranks, microbatches, MOST_SEARCHED if stages_per_rank is None else stages_per_rank, MOST_COMPUTES)
        return build(source, ranks, microbatches, stages_per_rank)
    try:
        entry = family(source)
    except UsageError as error:
        raise UsageError(
            f"{error}, nor a file or folder of that name; a schedule's file ends in .csv or .json"
        ) from None
    check_size(ranks, microbatches, stages_per_rank or entry.stages_per_rank, MOST_COMPUTES)
    return build(entry.name, ranks, microbatches, stages_per_rank)


def read_proved(source: str, sizes: Sizes) -> Schedule:
    """Read the schedule that the arguments mean; what a file holds is proved first."""
    schedule = read(source, sizes)
    if is_file(source):
        verify(schedule)
    return schedule


def check_steps(schedule: Schedule, steps: int) -> None:
    """Refuse more steps of a schedule than fit into memory."""
    computes = steps * 3 * schedule.stages * schedule.microbatches
    if steps > 1 and computes > MOST_COMPUTES:
        raise UsageError(
            f"{steps} steps of {schedule.microbatches} microbatches in {counted(schedule.stages, 'stage')} are "
            f"{computes:,} computes; the command takes {MOST_COMPUTES:,} at most; give fewer --steps"
        )


def read_one_of(source: str, sizes: Sizes) -> Schedule:
    """Read the schedule of one of several sources, which its faults name."""
    with naming(source):
        return read_proved(source, sizes)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Surround the reading of one of several files, so that faults name the file."""
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError([replace(fault, message=f"{source}: {fault.message}") for fault in error.faults]) from None


def _load(source: str, sizes: Sizes) -> Schedule:
    given = {"ranks": sizes.ranks, "microbatches": sizes.microbatches}
    facts = {name: value for name, value in given.items() if value is not None}
    if Path(source).suffix.lower() not in SUFFIXES:
        if not Path(source).exists():
            raise UsageError(f"there is no file or folder {source}; a schedule's file ends in .csv or .json")
        raise UsageError(f"{source}: a schedule's file ends in .csv or .json, so that its form is known")
    try:
        schedule = Schedule.load(source, check=False, **facts)
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {source}; give one that penstock show NAME --save FILE wrote, or a family's name "
            f"({', '.join(FAMILIES)})"
        ) from None
    except UsageError as error:  # the file's own doing
        raise ScheduleError(str(error)) from None
    except (UnicodeDecodeError, csv.Error, RecursionError, OverflowError) as error:
        raise ScheduleError(f"the file is not text that a schedule can be read from: {error}") from None
    computes = 2 * schedule.stages * schedule.microbatches
    if computes > MOST_COMPUTES:  # This comes before anything looks for each of them.
        raise ScheduleError(
            f"{schedule.microbatches} microbatches in {counted(schedule.stages, 'stage')} are {computes:,} computes; "
            f"the command takes {MOST_COMPUTES:,} at most"
        )
    found, due = schedule.placement.stages_per_rank, sizes.stages_per_rank
    if due not in (None, found):
        raise ScheduleError([Fault(f"the file has {counted(found, 'stage')} on a rank, not {due}")])
    return schedule


def described(schedule: Schedule, source: str) -> str:
    return f"{Path(source).name if is_file(source) else schedule.name}: {sizes_of(schedule)}"


def identity(schedule: Schedule) -> dict[str, Any]:
    """Name and sizes, for a machine."""
    return {name: getattr(schedule, name) for name in ("name", "ranks", "stages", "microbatches")}
