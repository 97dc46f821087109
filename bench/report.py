"""What every bench has: its command line, tables that are printed as they are measured, and one JSON document.

A bench says what it found as rows of values, and nothing else. A row is printed as soon as it is there; with `--json`
it is also kept, and all of them are one document on stdout at the end. Until that end stdout then leads to stderr, for
this process and all it starts, so that nothing else can come between.

No torch here: the benches of schedules measure what is done without it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import penstock

More = Callable[[argparse.ArgumentParser], object]


@dataclass
class Goal:
    """A figure, what it should be, and whether it is."""

    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.value:5.2f} {sign} {self.limit:.2f} {'' if self.met else 'MISSED'}"


class Column(NamedTuple):
    """`name` is the key of a row in JSON, and the head of the column unless `head` is; `form` shows a float."""

    name: str
    width: int = 0
    form: str = "{:.1f}"
    head: str = ""

    def show(self, cell: object) -> str:
        if cell is None:
            return "-"
        return self.form.format(cell) if isinstance(cell, float) else str(cell)


class Table:
    """Rows of values, one for each column; None where there is none. Only rank 0 says them."""

    def __init__(self, report: Report, rank: int, title: str, columns: Sequence[Column]) -> None:
        names = [column.name for column in columns]
        if len(set(names)) < len(names):
            raise ValueError(f"two columns of {title!r} have one name: {names}")
        self._report, self._quiet, self._columns = report, rank != 0, columns
        self._widths = [max(column.width, len(column.head or column.name)) for column in columns]
        load = os.getloadavg()[0]
        self._tell({"title": title, "load": load})
        self._print(f"\n{title}\n(load average of this machine at the start: {load:.1f}, on {os.cpu_count()} cores)")
        self._line([column.head or column.name for column in columns])

    def row(self, *cells: object) -> None:
        """One row. A Goal is shown with its limit, and is also one of the document's goals."""
        named = {column.name: cell for column, cell in zip(self._columns, cells, strict=True)}
        goals = {name: cell for name, cell in named.items() if isinstance(cell, Goal)}
        self._tell(
            {
                "row": {name: cell.value if isinstance(cell, Goal) else cell for name, cell in named.items()},
                "goals": {name: [goal.value, goal.limit, goal.at_least, goal.met] for name, goal in goals.items()},
            }
        )
        self._line([column.show(cell) for column, cell in zip(self._columns, cells, strict=True)])

    def _line(self, texts: Sequence[str]) -> None:
        aligned = [
            text.ljust(width) if not index or "=" in text else text.rjust(width)
            for index, (text, width) in enumerate(zip(texts, self._widths, strict=True))
        ]
        self._print("  ".join(aligned).rstrip())

    def _tell(self, entry: dict[str, Any]) -> None:
        if not self._quiet:
            self._report.keep(entry)

    def _print(self, text: str) -> None:
        if not self._quiet:
            _write(text)


class Report:
    """The tables of a bench. Ranks are processes of their own: what rank 0 has to say goes through a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path  # None: printed, and not kept

    def table(self, rank: int, title: str, columns: Sequence[Column]) -> Table:
        return Table(self, rank, title, columns)

    def keep(self, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")

    def document(self) -> dict[str, Any]:
        """The tables with their rows, and all goals with where they are."""
        tables: list[dict[str, Any]] = []
        goals: list[dict[str, Any]] = []
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path and self._path.exists() else []
        for entry in map(json.loads, lines):
            if "title" in entry:
                tables.append({**entry, "rows": []})
                continue
            rows = tables[-1]["rows"]
            for column, (value, limit, at_least, met) in entry["goals"].items():
                place = {"table": len(tables) - 1, "row": len(rows), "column": column}
                goals.append({**place, "value": value, "limit": limit, "at_least": at_least, "met": met})
            rows.append(entry["row"])
        return {"tables": tables, "goals": goals}


@contextmanager
def bench(
    text: str | None,
    rounds: int | None = None,
    schedules: Sequence[str] = (),
    default: Sequence[str] = (),
    more: More | None = None,
) -> Iterator[argparse.Namespace]:
    """The command line of a bench; what is done with it is the bench, and at its end is the document, if asked for.

    `rounds` is how many there are by default, None for a bench that has none; `schedules` are those it can run, of
    which it runs `default` (all); `more` adds options of its own.
    """
    settings = _parser(text, rounds, schedules, default, more).parse_args()
    if settings.quick and rounds is not None:
        settings.rounds = min(settings.rounds, 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in an orderly way: folders are removed, ranks end
    try:
        if not settings.json:
            settings.report = Report(None)
            yield settings
            return
        with tempfile.TemporaryDirectory() as folder:
            settings.report = Report(Path(folder) / "rows")
            with _stdout_to_stderr():
                yield settings
            document = {**_about(text, settings), **settings.report.document()}
            _write(json.dumps(document, indent=2, allow_nan=False))
    except KeyboardInterrupt:
        sys.exit(130)


def _parser(
    text: str | None, rounds: int | None, schedules: Sequence[str], default: Sequence[str], more: More | None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"penstock bench {_name()}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="little work, few rounds: that it runs, not how fast")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout; the tables go to stderr")
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=at_least_one, default=rounds, help=f"rounds of each comparison (default {rounds})"
        )
    if schedules:
        add_names(parser, "--schedules", schedules, default or schedules)
    if more is not None:
        more(parser)
    return parser


def add_names(parser: argparse.ArgumentParser, option: str, names: Sequence[str], default: Sequence[str] = ()) -> None:
    """An option that takes some of the names."""

    def read(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [name for name in found if name not in names]
        if wrong or not found:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong) or 'nothing'} is none of {', '.join(names)}")
        return found

    default = list(default or names)
    shown = "all" if default == list(names) else ",".join(default)
    parser.add_argument(
        option, type=read, default=default, help=f"some of {', '.join(names)}, with commas (default {shown})"
    )


def at_least_one(text: str) -> int:
    """For argparse: a whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 up")
    return int(text)


def _name() -> str:
    return Path(sys.argv[0]).stem


def _about(text: str | None, settings: argparse.Namespace) -> dict[str, Any]:
    """What was run, and on what."""
    options = {name: value for name, value in vars(settings).items() if name not in ("report", "json", "worker")}
    versions = {"penstock": penstock.__version__, "torch": importlib.metadata.version("torch")}
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
    title = (text or "").partition("\n")[0]
    return {"bench": _name(), "title": title, "options": options, "machine": {**machine, **versions}}


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Also for the processes that are started meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _write(text: str) -> None:
    """At once; nothing where who reads it (`| head`) has seen enough."""
    from penstock.cli.output import write  # not above: it is more than a schedule's memory should be measured with

    write(text)
