"""Tables of the reference that are made of the code itself. A page asks for one: `<!-- generated: command -->`."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import typer

from penstock.cli import app
from penstock.tools.train.config.read import all_keys
from penstock.tools.train.config.settings import GPTOptions, TrainConfig


def command() -> str:
    """Every command with its arguments and options, from typer's own help."""
    return "\n".join(_commands(typer.main.get_command(app), "penstock"))


def _commands(entry: Any, path: str) -> Iterator[str]:
    context = entry.context_class(entry, info_name=path)
    usage = " ".join(entry.get_usage(context).removeprefix("Usage: ").split())
    yield from ["", f"## `{path}`", "", _help(entry.help or ""), "", "```text", usage, "```", ""]
    records = [parameter.get_help_record(context) for parameter in entry.get_params(context)]
    rows = [f"| `{_cell(_names(names))}` | {_cell(_help(about))} |" for names, about in filter(None, records)]
    yield from _table("options", ["argument or option", "meaning"], rows)
    for name, inner in getattr(entry, "commands", {}).items():
        yield from _commands(inner, f"{path} {name}")


def _help(text: str) -> str:
    """Help as Markdown: options are code, lines are joined into paragraphs."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip())]
    return "\n\n".join(re.sub(r"(?<![\w`-])(--?[a-z][\w-]*)", r"`\1`", paragraph) for paragraph in paragraphs)


def _names(text: str) -> str:
    """How an argument or option is written, without the types that typer adds, which say nothing to a user."""
    return re.sub(r" <(str|list\[str\])>$", "", text)


def _table(kind: str, head: list[str], rows: list[str]) -> list[str]:
    """A table whose columns are as wide as site.css says for its kind."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]
    return ["```{table}", f":class: arguments {kind}", "", *lines, "```", ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def configuration() -> str:
    """Every key of a configuration with its type, default and meaning, from the classes that check it."""
    hints = typing.get_type_hints(TrainConfig)
    keys = list(all_keys())
    lines = _keys("At the top", TrainConfig, [key for key in keys if "." not in key[0]])
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            lines += _keys(f"`[{name}]`", kind, [key for key in keys if key[0].startswith(f"{name}.")])
        if name == "model":
            lines += _keys("`[model.options]` of `gpt`", GPTOptions, list(all_keys(GPTOptions, "model.options.")))
    return "\n".join(lines)


def _keys(title: str, kind: Any, keys: list[tuple[str, str, Any, str]]) -> list[str]:
    rows = []
    for name, takes, default, about in keys:
        shown = "-" if default in (None, [], {}) else json.dumps(default)
        rows.append(f"| `{name}` | `{shown}` | {_cell(takes)} | {_cell(about)} |")
    table = _table("keys", ["key", "default", "takes", "meaning"], rows)
    return ["", f"## {title}", "", kind.__doc__ or "", "", *table]


TABLES: dict[str, Callable[[], str]] = {"command": command, "configuration": configuration}
