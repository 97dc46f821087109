"""`penstock primer`: the short course's programs, listed, shown, copied, or run and drawn.

The programs are plain files that start their own processes, and stand in the wheel as they do in
`examples/primer`. Here one is run as anybody would run it, in a process of its own; what it prints
is drawn. A copy that a reader has changed is run the same way.

The drawing has a lane for each rank and a line for each event, time downwards. Programs print plain lines and know
nothing of it:

    rank 0 -> rank 1, 3: [3, 1]        rank 0 sends [3, 1] to ranks 1 and 3
    rank 2: has [3, 1]                 something about rank 2 alone
    anything else                      as it is

    0     1     2     3
    o---->|-----+---->|     [3, 1]
    |     |     o     |     has [3, 1]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from penstock.cli.output import (
    complain,
    fold,
    guarded,
    paints,
    rendered,
    terminal_width,
    working,
    write,
    write_json,
    writes,
)
from penstock.cli.programs import find_folder, places_of, started, title_of, unknown, write_list
from penstock.cli.source import AsJson, count, option
from penstock.errors import UsageError
from penstock.view.figures import counted

PLACES = places_of("primer", "examples/primer")
WIDE = 100

Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME|FILE.py]",
        help="A program's name or number, or a copy of one; without it, the list.",
        show_default=False,
    ),
]
Ranks = Annotated[int | None, count("Processes to start (default: the program's own).", "--ranks", "-r")]
Source = Annotated[bool, option("Print the program instead of running it.", "--source")]
Copy = Annotated[Path | None, option("Copy all programs into a new folder, to be changed and run.", metavar="FOLDER")]


@guarded
def primer(
    name: Name = None, ranks: Ranks = None, source: Source = False, copy: Copy = None, as_json: AsJson = False
) -> None:
    """Learn parallelism from short programs: list them, or run one and draw who sends what to whom.

    Start with `penstock primer send-recv`, and go on in the order of the list. docs/primer.md walks through them.
    """
    programs = _programs()
    if copy is not None:
        _copy_to(copy, name)
    elif name is None:
        if ranks is not None or source:
            named = "--source" if source else "--ranks"
            raise UsageError(f"{named} needs a program's name, such as {_name(programs[1])}")
        _list(programs, as_json)
    elif source:
        _show(_find(name, programs))
    else:
        _run(_find(name, programs), ranks, as_json)


def _folder() -> Path:
    return find_folder(PLACES, "launch.py", "the primer's programs")


def _programs() -> list[Path]:
    return sorted(_folder().glob("[0-9][0-9]_*.py"))


def _name(path: Path) -> str:
    """Return a program's name: `02_broadcast.py` is called broadcast, `06_all_gather.py` all-gather."""
    return path.stem.partition("_")[2].replace("_", "-")


def _find(name: str, programs: list[Path]) -> Path:
    """Find a file of the reader's own; else by name, number or file name in any case."""
    if name.endswith(".py") and Path(name).is_file():
        return Path(name)
    plain = name.lower().removesuffix(".py").replace("_", "-")
    for path in programs:
        number = path.name[:2]
        if plain in (_name(path), number, str(int(number)), f"{number}-{_name(path)}"):
            return path
    if name.endswith(".py"):
        raise UsageError(f"there is no file {name}; penstock primer --copy FOLDER makes copies to run")
    raise unknown("the primer", "program", name, [_name(path) for path in programs])


def _list(programs: list[Path], as_json: bool) -> None:
    if as_json:
        write_json([{"name": _name(path), "title": title_of(path), "path": str(path)} for path in programs])
        return
    titles = [title_of(path).removeprefix(f"{_name(path)}: ") for path in programs]
    labels = [f"{number:2}  {_name(path)}" for number, path in enumerate(programs, 1)]
    write_list(list(zip(labels, titles, strict=True)))
    write("\nrun one: penstock primer NAME; read it: penstock primer NAME --source")
    write("change them: penstock primer --copy FOLDER; run a changed one: penstock primer FOLDER/NN_name.py")


def _show(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if paints():
        Console().print(Syntax(text, "python", background_color="default"))
    else:
        write(text.rstrip("\n"))


def _copy_to(folder: Path, name: str | None) -> None:
    if name is not None:
        raise UsageError("--copy takes all programs, because they share two files; leave the name out")
    if folder.exists():
        raise UsageError(f"{folder} exists already; name a new folder")
    shutil.copytree(_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    count = counted(len(list(folder.glob("[0-9]*.py"))), "program")
    write(f"{count} in {folder}; run one: python {folder}/01_send_recv.py")


def _run(path: Path, ranks: int | None, as_json: bool) -> None:
    command = [sys.executable, str(path.resolve()), *([] if ranks is None else [str(ranks)])]
    with working(f"running {path.name}"):
        code, output, errors = _finish(command)
    events = [read_event(line) for line in output.splitlines()]
    if as_json:
        write_json(_document(path, events, code))
    else:
        write(fold(title_of(path), terminal_width()) + "\n")
        for line in _drawn(events):
            write(line)
    if code != 0:
        complain(f"{path.name} ended with exit code {code}:\n{errors.rstrip()}")
        raise typer.Exit(1)


def _finish(command: list[str]) -> tuple[int, str, str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, {"OMP_NUM_THREADS": "1", **os.environ}, **pipes) as program:  # One thread a rank.
        output, errors = program.communicate()
    return program.returncode, output, errors


def _drawn(events: list[LaneEvent]) -> Iterator[str]:
    ranks = 1 + max((event.highest for event in events), default=-1)
    lanes = Lanes(ranks, width=terminal_width(), plain=not writes("".join(PRETTY.values())))
    return (rendered(line, terminal_width() or WIDE, soft_wrap=True) for line in lanes.draw(events))


def _document(path: Path, events: list[LaneEvent], code: int) -> dict[str, Any]:
    lines = [{"from": event.source, "to": list(event.targets), "text": event.text} for event in events]
    return {"program": path.stem, "title": title_of(path), "exit_code": code, "events": lines}


SENDS = re.compile(r"rank (?P<source>\d+) -> rank (?P<targets>\d+(?:, \d+)*): (?P<text>.*)")
ALONE = re.compile(r"rank (?P<source>\d+): (?P<text>.*)")
COLOURS = ("cyan", "magenta", "yellow", "green", "bright_blue", "bright_red", "bright_cyan", "bright_magenta")
WIDEST, NARROWEST = 6, 3  # columns of a lane; fewer where there are many ranks
LEAST = 24  # columns for the words, however narrow the terminal
PRETTY = {"o": "●", "-": "─", ">": "▶", "<": "◀", "|": "│", "+": "┼"}


@dataclass(frozen=True)
class LaneEvent:
    """One line that a program printed."""

    text: str
    source: int | None = None
    targets: tuple[int, ...] = ()

    @property
    def highest(self) -> int:
        """The highest rank in it; -1 where it names none."""
        return max((-1 if self.source is None else self.source, *self.targets))


def read_event(line: str) -> LaneEvent:
    """Read an event from a line that a program printed."""
    if found := SENDS.fullmatch(line):
        targets = tuple(int(rank) for rank in found["targets"].split(", "))
        return LaneEvent(found["text"], int(found["source"]), targets)
    if found := ALONE.fullmatch(line):
        return LaneEvent(found["text"], int(found["source"]))
    return LaneEvent(line)


class Lanes:
    """Draws events of `ranks` ranks: in plain letters where the terminal has no others, as wide as it is."""

    def __init__(self, ranks: int, *, width: int | None = None, plain: bool = False) -> None:
        self.ranks = ranks
        self._lane = WIDEST
        if width is not None and ranks:
            self._lane = min(WIDEST, max(NARROWEST, (width - LEAST) // ranks))
        self._room = None if width is None else max(LEAST, width - ranks * self._lane - 1)
        self._letters = str.maketrans({} if plain else PRETTY)

    def draw(self, events: Iterable[LaneEvent]) -> Iterator[Text]:
        """Yield the lines; the ranks' numbers stand above whenever lanes begin anew."""
        inside = False
        for event in events:
            if event.source is None:
                yield Text(event.text)
                inside = False
                continue
            if not inside:
                yield self._heading()
                inside = True
            yield from self._lines(event)

    def _heading(self) -> Text:
        heading = Text()
        for rank in range(self.ranks):
            heading.append(str(rank).ljust(self._lane), f"bold {COLOURS[rank % len(COLOURS)]}")
        return heading

    def _lines(self, event: LaneEvent) -> Iterator[Text]:
        words = event.text.split("\n") if self._room is None else textwrap.wrap(event.text, self._room) or [""]
        yield self._row(event) + Text(words[0])
        for more in words[1:]:
            yield self._row(LaneEvent("")) + Text(more)

    def _row(self, event: LaneEvent) -> Text:
        lane = self._lane
        cells = list(("|" + " " * (lane - 1)) * self.ranks)
        if event.source is None:
            return Text("".join(cells).translate(self._letters))
        ends = (event.source, *event.targets)
        painted = range(min(ends) * lane, max(ends) * lane + 1)
        for column in painted:
            cells[column] = "+" if cells[column] == "|" else "-"
        for target in event.targets:
            cells[target * lane] = "|"
            if target != event.source:
                cells[target * lane + (-1 if target > event.source else 1)] = ">" if target > event.source else "<"
        cells[event.source * lane] = "o"
        row = Text("".join(cells).translate(self._letters))
        row.stylize(f"bold {COLOURS[event.source % len(COLOURS)]}", painted.start, painted.stop)
        return row
