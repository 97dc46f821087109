"""Programs that come with Penstock as plain files, and run in processes of their own.

They stand in a folder of a working copy, and in the wheel below the package. Each is run as
anybody would run it, by the same Python and with the same Penstock. It leads a process group, so
that whatever ends the command (Ctrl-C, a signal, an error) ends the program and all that it started.
"""

from __future__ import annotations

import ast
import difflib
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import penstock
from penstock.cli.output import terminal_width, write
from penstock.errors import UsageError
from penstock.tools.train.launch.stopping import asking

PACKAGE = Path(penstock.__file__).parent
PATIENCE = 10.0  # seconds in which a program that is told to end may clean up


def places_of(installed: str, checkout: str) -> tuple[Path, Path]:
    """Return where a folder of programs may be: below the package, where a wheel has it, or in a working copy."""
    return PACKAGE / installed, PACKAGE.parents[1] / checkout


def find_folder(places: Sequence[Path], mark: str, what: str) -> Path:
    """Find the first of the places that has the file `mark`."""
    for place in places:
        if (place / mark).is_file():
            return place
    raise UsageError(f"{what} are not where they should be: {places[0]}; install penstock again")


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a program's source; each file is read once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def title_of(path: Path) -> str:
    """Return the first line of a program's docstring."""
    return (ast.get_docstring(tree_of(path)) or path.name).partition("\n")[0]


def write_list(entries: Sequence[tuple[str, str]]) -> None:
    """Write a line for each label and its text, which on a terminal is wrapped beside the label."""
    widest = max(len(label) for label, _ in entries)
    width = terminal_width()
    for label, text in entries:
        lines = [text] if width is None else textwrap.wrap(text, max(20, width - widest - 2), break_on_hyphens=False)
        write(f"{label.ljust(widest)}  {lines[0]}")
        for line in lines[1:]:
            write(" " * (widest + 2) + line)


def unknown(who: str, what: str, name: str, names: Sequence[str]) -> UsageError:
    """Make the error that `who` has no such thing, with the nearest names and all of them."""
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return UsageError(f"{who} has no {what} {name!r}{hint} (it has: {', '.join(names)})")


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str] = os.environ, **streams: Any
) -> Iterator[subprocess.Popen[Any]]:
    """Run a program until this is left, by whichever way; then nobody of its process group is left either."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in asking()}
    try:
        own = _environment(Path(command[1]).parent, environment)
        with subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, process_group=0, **streams) as program:
            try:
                yield program
            finally:
                _end(program)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a program finds what lies beside it, and the package that runs here.

    This one may have been found by other means than the program would find it by; and the command keeps Python from
    looking into folders by itself.
    """
    home = str(PACKAGE.parent)
    paths = [str(folder), "" if home == sysconfig.get_path("purelib") else home, environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _end(program: subprocess.Popen[Any]) -> None:
    """Ask all of the group, wait for its leader, which cleans up; then insist. A second Ctrl-C insists at once."""
    try:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                program.wait(PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
