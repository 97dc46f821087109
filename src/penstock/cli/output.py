"""How the command writes: text, JSON, faults and complaints, and with which exit code.

0: done; 1: the schedule or checkpoint in a file is wrong, and every fault is listed, or a run
failed; 2: the command was called with something that cannot work, and one paragraph on stderr
says what would; 130: stopped by Ctrl-C.

Colour goes to terminals alone. A reader that stops early (`| head`) ends the output and not
the command, so the exit code still says what was found.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, TextIO, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from penstock.errors import CheckpointError, Fault, PenstockError, RunError, ScheduleError, UsageError
from penstock.view.figures import counted, visible

LONGEST = 20_000  # characters of a message


def write(text: str, stream: TextIO | None = None) -> None:
    """Write one piece of output and a line end; nothing at all once the reader is gone."""
    name = "stderr" if stream is sys.stderr else "stdout"
    stream = stream or sys.stdout
    try:
        text = visible(text, colours="\x1b[" in text and stream is sys.stdout and paints())
        try:
            stream.write(text + "\n")
        except UnicodeEncodeError:  # a file's name or cell, on a terminal that has no such letter
            stream.write(text.encode("ascii", "backslashreplace").decode() + "\n")
        stream.flush()
    except BrokenPipeError:
        _close(stream)
    except OSError as error:  # a full disk: what is still in the buffer must not fail again at the end
        _close(stream)
        raise OSError(error.errno, error.strerror, name) from None


def writes(text: str) -> bool:
    """Return whether stdout has these letters: a terminal without UTF-8 does not."""
    with suppress(UnicodeEncodeError):
        return bool(text.encode(sys.stdout.encoding or "utf-8"))
    return False


def _close(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def write_json(document: object) -> None:
    """Write a document for a machine to stdout. JSON has no infinity: numbers that overflowed are refused."""
    try:
        text = json.dumps(document, indent=2, allow_nan=False)
    except ValueError:
        raise UsageError("the numbers are too large to be added up; give costs in a larger unit") from None
    write(text)


def complain(message: str) -> None:
    """Write one paragraph to stderr, of which a text of megabytes in somebody's file has its middle left out."""
    if len(message) > LONGEST:
        left_out, half = len(message) - LONGEST, LONGEST // 2
        message = f"{message[:half]} ... {left_out:,} characters left out ... {message[-half:]}"
    write(f"penstock: {message}", sys.stderr)


def document_of(fault: Fault) -> dict[str, Any]:
    action = None if fault.action is None else str(fault.action)
    return {"rank": fault.rank, "position": fault.position, "action": action, "message": fault.message}


def write_faults(title: str, faults: Sequence[Fault], stream: TextIO | None = None) -> None:
    """Write every fault on its own line, under a line that counts them."""
    write("\n".join([f"{title}: {counted(len(faults), 'fault')}", *(f"  {fault}" for fault in faults)]), stream)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn a command's errors into messages and exit codes; a dataclass among its parameters is an option per field.

    So options that several commands have are listed once, and read as one value.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(command)
    def run(**options: Any) -> None:
        try:
            for name, group in groups.items():
                options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
            command(**options)
        except ScheduleError as error:
            if options.get("as_json"):
                write_json({"faults": [document_of(fault) for fault in error.faults]})
            else:
                write_faults(str(options.get("source", "the schedule")), error.faults, sys.stderr)
            raise typer.Exit(1) from None
        except CheckpointError as error:
            if options.get("as_json"):
                write_json({"error": str(error)})
            else:
                complain(str(error))
            raise typer.Exit(1) from None
        except UsageError as error:
            refuse(str(error))
        except PenstockError as error:  # Work was under way: it is no fault of how it was called.
            complain(str(error))
            raise typer.Exit(1) from None
        except OSError as error:
            refuse(f"{error.filename or 'a file'}: {error.strerror or error}")
        except OverflowError:
            refuse("the numbers are too large to be added up; give costs in a larger unit")
        except MemoryError:
            fewer = "; try fewer ranks or microbatches" if {"source", "sources"} & set(options) else ""
            refuse(f"penstock {command.__name__.strip('_')} needs more memory than this machine has{fewer}")

    run.__signature__ = _signature(command, hints, groups)  # type: ignore[attr-defined]
    return run


def _signature(command: Callable[..., None], hints: Mapping[str, Any], groups: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature that typer reads: the fields of a group stand where the group does."""
    found: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            found.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        kinds = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            kind = kinds[field.name]
            found.append(inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=kind))
    return inspect.Signature(found)


def refuse(message: str) -> NoReturn:
    complain(message)
    raise typer.Exit(2)


def paints() -> bool:
    """Return whether stdout may take colours: a pipe or a dumb terminal may not, nor anything under NO_COLOR."""
    console = Console()
    return console.is_terminal and console.color_system is not None and not console.no_color


def terminal_width() -> int | None:
    """Return the columns of the terminal on stdout; None for a pipe or file, where nothing is wrapped."""
    console = Console()
    return console.width if console.is_terminal else None


def rendered(what: Any, width: int, **print_options: Any) -> str:
    """Render what rich draws on stdout, as text; coloured where stdout takes colours."""
    colour = paints()
    console = Console(width=width, force_terminal=colour, no_color=not colour, highlight=False)
    with console.capture() as captured:
        console.print(what, **print_options)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on stderr while `what` is done, to terminals only; an error for want of memory names the work."""
    with Console(stderr=True).status(Text(visible(what))):
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the latter is torch's
                raise RunError(f"{what} needs more memory than this machine has") from error
            raise


def fold(text: str, width: int | None) -> str:
    """Wrap a text to the terminal, further lines indented; leave it as it is for a pipe."""
    if width is None:
        return text
    return textwrap.fill(text, max(width, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def shortened(items: Iterable[object], most: int = 24) -> str:
    """List the items in a line; of more than `most`, the first and last few and how many there are."""
    texts = [str(item) for item in items]
    if len(texts) <= most:
        return " ".join(texts)
    return f"{' '.join(texts[: most // 2])} ... {' '.join(texts[-most // 4 :])} ({len(texts)} in all)"


def number(value: float) -> str:
    """Format a number with six digits at most, and no trailing zeros."""
    return f"{value:.6g}"
