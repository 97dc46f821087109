"""`penstock primer`: the short course's programs, listed, shown, copied, or run and drawn.

The programs are plain files that start their own processes, and stand in the wheel as they do in
`examples/primer`. Here one is run as anybody would run it, in a process of its own; what it prints
is drawn. A copy that a reader has changed is run the same way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax

from penstock.cli.lanes import PRETTY, LaneEvent, Lanes, read_event
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
from penstock.cli.source import AsJson, count
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
Source = Annotated[bool, typer.Option("--source", help="Print the program instead of running it.")]
Copy = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Copy all programs into a new folder, to be changed and run.")
]


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
            raise UsageError(
                f"{'--source' if source else '--ranks'} needs a program's name, such as {_name(programs[1])}"
            )
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
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # one thread a rank
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, environment, **pipes) as program:
        output, errors = program.communicate()
    return program.returncode, output, errors


def _drawn(events: list[LaneEvent]) -> Iterator[str]:
    ranks = 1 + max((event.highest for event in events), default=-1)
    lanes = Lanes(ranks, width=terminal_width(), plain=not writes("".join(PRETTY.values())))
    return (rendered(line, terminal_width() or WIDE, soft_wrap=True) for line in lanes.draw(events))


def _document(path: Path, events: list[LaneEvent], code: int) -> dict[str, Any]:
    lines = [{"from": event.source, "to": list(event.targets), "text": event.text} for event in events]
    return {"program": path.stem, "title": title_of(path), "exit_code": code, "events": lines}
