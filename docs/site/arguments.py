"""Sections of docstrings as tables: each argument with its meaning, and its type and default from the signature."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
ENTRY = re.compile(r"^(?P<name>\**\w+(?:\.\w+)*): (?P<about>.*)", re.DOTALL)
HEADS = {  # columns, and how wide they are
    "Args": {"argument": 20, "type": 23, "default": 14, "meaning": 43},
    "Attributes": {"attribute": 20, "type": 25, "meaning": 55},
    "Raises": {"error": 20, "when": 80},
}


def tabulate(app: Any, what: str, name: str, subject: Any, options: Any, lines: list[str]) -> None:
    """Turn the sections of one docstring, in place, into tables of reStructuredText (autodoc calls this)."""
    lines[:] = list(_rewritten(name, subject, lines))


def sections(lines: list[str]) -> Iterator[tuple[str | None, list[str]]]:
    """A docstring in pieces: ordinary text (None) and the bodies of its sections."""
    head: str | None = None
    body: list[str] = []
    for line in lines:
        found = SECTION.match(line)
        if found or (head and line and not line.startswith(" ")):
            yield head, body
            head, body = (found[1], []) if found else (None, [line])
        else:
            body.append(line)
    yield head, body


def entries(body: list[str]) -> list[tuple[str, str]]:
    """(name, meaning) of a section; lines that are indented further belong to the entry above."""
    texts: list[str] = []
    for line in textwrap.dedent("\n".join(body)).splitlines():
        if line.startswith(" ") and texts:
            texts[-1] += f" {line.strip()}"
        elif line:
            texts.append(line)
    found = [ENTRY.match(text) for text in texts]
    wrong = [text for text, match in zip(texts, found, strict=True) if match is None]
    if wrong:
        raise ValueError(f"a section of a docstring has a line that is not `name: meaning`: {wrong[0]!r}")
    return [(match["name"], match["about"]) for match in found if match]


def _rewritten(name: str, subject: Any, lines: list[str]) -> Iterator[str]:
    for head, body in sections(lines):
        if head is None:
            yield from body
        elif head in ("Returns", "Yields"):
            yield from [f"**{head}:** {' '.join(' '.join(body).split())}", ""]
        else:
            try:
                rows = [_row(head, subject, *entry) for entry in entries(body)]
            except KeyError as error:
                raise ValueError(f"{name} explains the argument {error}, which it does not take") from None
            yield from _table(HEADS[head], rows)


def _row(head: str, subject: Any, name: str, about: str) -> list[str]:
    if head == "Raises":
        return [f"`{name}`", about]
    if head == "Attributes":
        return [f"`{name}`", _literal(_attribute_type(subject, name)), about]
    parameter = inspect.signature(subject).parameters[name.lstrip("*")]
    kind = "" if parameter.annotation is parameter.empty else parameter.annotation
    return [f"`{name}`", _literal(kind), _literal(_default(parameter, subject)), about]


def _attribute_type(subject: Any, name: str) -> Any:
    for owner in subject.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            return owner.__annotations__[name]
        found = vars(owner).get(name)
        if isinstance(found, property):
            return inspect.signature(found.fget).return_annotation if found.fget else ""
    parameters = inspect.signature(subject).parameters
    return parameters[name].annotation if name in parameters else ""


def _default(parameter: inspect.Parameter, subject: Any) -> str:
    if parameter.default is parameter.empty:
        return ""
    if repr(parameter.default) == "<factory>":
        (factory,) = (each.default_factory for each in dataclasses.fields(subject) if each.name == parameter.name)
        return repr(factory())
    if dataclasses.is_dataclass(parameter.default):  # one that holds options: its own table has the defaults
        return f"{type(parameter.default).__name__}()"
    return repr(parameter.default)


def _literal(value: Any) -> str:
    text = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return f"``{text}``" if text else ""


def _table(head: dict[str, int], rows: list[list[str]]) -> Iterator[str]:
    yield from ["", ".. list-table::", "   :header-rows: 1", "   :class: arguments"]
    yield from [f"   :widths: {' '.join(map(str, head.values()))}", ""]
    for row in [list(head), *rows]:
        for place, cell in enumerate(row):
            yield f"   {'* -' if place == 0 else '  -'} {cell}".rstrip()
    yield ""
