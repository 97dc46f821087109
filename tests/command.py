"""The `penstock` command, called in this process, and what several of its tests read."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from penstock.cli import app
from penstock.schedule import build, lower

# of `1f1b` on 2 ranks, 2 microbatches
PICTURE = """\
slot   0   1   2   3   4   5
rank 0 0F0 0F1 .   0B0 .   0B1
rank 1 .   1F0 1B0 1F1 1B1 .
"""


def run(*arguments: object) -> Result:
    """What a command line does; an error that no user should see is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def swapped(path: Path) -> Path:
    """A program in which rank 0 sends its first two outputs the wrong way round."""
    program = lower(build("gpipe", ranks=2, microbatches=3))
    row = list(program.rank(0))
    sends = [position for position, action in enumerate(row) if str(action).startswith("0SEND_F")]
    row[sends[0]], row[sends[1]] = row[sends[1]], row[sends[0]]
    program.replace([row, *program.rows[1:]]).save(path)
    return path
