"""The reference is complete: every public name is on a page, and every argument, key and command is explained.

`docs/site` makes the pages; the slow test builds the whole site, where a broken link, an unknown name or a page that
nothing leads to is an error.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest

import penstock
import penstock.compat
import penstock.errors
import penstock.schedule
from penstock.cli import app
from penstock.tools.train.config.read import all_keys

ROOT = Path(__file__).resolve().parent.parent
COMPAT = [
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(penstock.compat.__path__, "penstock.compat.")
    if module.name != "penstock.compat.gpipe"
]
TORCHGPIPE = [
    importlib.import_module(f"penstock.compat.torchgpipe.{name}") for name in ("balance", "batchnorm", "skip")
]
MODULES = [penstock, penstock.schedule, *COMPAT, *TORCHGPIPE]
INTEGRATIONS = sorted(  # read and not imported: each imports a whole trainer
    f"penstock.integrations.{path.parent.name}.{name}"
    for path in (ROOT / "src/penstock/integrations").glob("*/__init__.py")
    for name in re.findall(r'"(\w+)"', path.read_text(encoding="utf-8").partition("__all__ = ")[2])
)
NAMES = sorted(
    [f"{module.__name__}.{name}" for module in MODULES for name in module.__all__ if name != "__version__"]
    + [
        f"penstock.errors.{name}"
        for name, each in vars(penstock.errors).items()
        if getattr(each, "__module__", "") == "penstock.errors" and inspect.isclass(each)
    ]
)
HELD = [  # classes that users get from a call and have no name of their own in `penstock`
    "penstock.model.balance.proposal.Proposal",
    "penstock.tools.parity_check.parity.Parity",
    "penstock.planner.ranking.Plan",
    "penstock.pipeline.trained_step.TrainedStep",
    "penstock.planner.ranking.Plans",
    "penstock.tools.rehearsal.faults.PlannedFault",
    "penstock.tools.rehearsal.rank.Notice",
    "penstock.tools.rehearsal.rehearse.Rehearsal",
    "penstock.tools.rehearsal.training.Attempt",
    "penstock.runtime.engine.handlers.Context",
]


def part_of_the_site(name: str) -> ModuleType:
    """A module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs/site" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arguments = part_of_the_site("arguments")
generated = part_of_the_site("generated")


def found(name: str) -> Any:
    """What a dotted name stands for."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_every_public_name_is_on_one_page() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/reference").glob("*.md")))
    shown = re.findall(r"(?m)^\.\. (?:auto\w+|py:data):: ([\w.]+)$", pages)
    assert len(INTEGRATIONS) > 2
    assert sorted(shown) == sorted([*NAMES, *HELD, *INTEGRATIONS])


def documented(subject: Any) -> dict[str, str]:
    """The arguments, or attributes, that a docstring explains."""
    lines = (inspect.getdoc(subject) or "").splitlines()
    bodies = [body for head, body in arguments.sections(lines) if head in ("Args", "Attributes")]
    return {name.lstrip("*"): about for body in bodies for name, about in arguments.entries(body)}


def members(subject: type) -> dict[str, Any]:
    """Return what a class has, with what it has of a base that has no page of its own."""
    bases = [each for each in subject.__mro__[1:] if each.__module__.startswith("penstock.pipeline.")]
    return {**{name: value for each in bases for name, value in vars(each).items()}, **vars(subject)}


def signed(name: str) -> Iterator[tuple[str, Any]]:
    """A public name and its public methods, as far as they take arguments of their own."""
    subject = found(name)
    if not inspect.isclass(subject):
        if callable(subject):
            yield name, subject
        return
    own = dataclasses.is_dataclass(subject) or hasattr(subject, "_fields") or "__init__" in vars(subject)
    if own:
        yield name, subject
    for method, value in members(subject).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(function) and not method.startswith("_"):
            yield f"{name}.{method}", function if isinstance(value, staticmethod) else MethodType(function, subject)


@pytest.mark.parametrize("name", [*NAMES, *HELD])
def test_every_argument_has_a_meaning(name: str) -> None:
    for place, subject in signed(name):
        if place == "penstock.runtime.engine.handlers.Context":
            continue  # handed to users, never made by them
        taken = list(inspect.signature(subject).parameters)
        missing = [each for each in taken if each not in documented(subject)]
        assert missing == [], f"{place} does not explain {missing}"
        heads = [head for head, _ in arguments.sections((inspect.getdoc(subject) or "").splitlines())]
        if "Args" in heads:
            assert [each for each in documented(subject) if each not in taken] == [], place


@pytest.mark.parametrize("name", [*NAMES, *HELD])
def test_every_docstring_begins_with_a_sentence(name: str) -> None:
    subjects = [found(name)] if name != "penstock.schedule.FAMILIES" else []
    if subjects and inspect.isclass(subjects[0]):
        own = [value for key, value in members(subjects[0]).items() if not key.startswith("_")]
        subjects += [each for each in own if inspect.isfunction(each) or isinstance(each, property)]
    for subject in subjects:
        first = (inspect.getdoc(subject) or "").partition("\n\n")[0]
        assert first.endswith((".", ":", ").")), f"{name}: {subject}: {first!r}"


@pytest.mark.slow
@pytest.mark.parametrize("name", INTEGRATIONS)
def test_every_argument_of_a_trainer_has_a_meaning(name: str) -> None:
    subject = found(name)
    taken = inspect.signature(subject).parameters if "__init__" in vars(subject) else {}
    assert sorted(documented(subject)) == sorted(taken)


def test_every_key_is_in_the_reference_with_its_default() -> None:
    assert "<!-- generated: configuration -->" in (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    table = generated.configuration()
    for name, _, default, about in all_keys():
        shown = "-" if default in (None, [], {}) else json.dumps(default)
        assert f"| `{name}` | `{shown}` |" in table, f"{name} with default {shown}"
        assert about.replace("|", "\\|") in table


def test_every_command_is_in_the_reference_with_its_options() -> None:
    assert "<!-- generated: command -->" in (ROOT / "docs/reference/command.md").read_text(encoding="utf-8")
    text = generated.command()
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    names += [f"checkpoint {name}" for name in ("list", "verify", "export", "diff")]
    assert len(names) > 15
    for name in names:
        section = text.partition(f"\n## `penstock {name}`\n")[2].partition("\n## ")[0]
        assert "`--help`" in section, name
    assert "`-r, --ranks N`" in text


def test_a_table_has_type_default_and_meaning() -> None:
    def taking(size: int, *rest: str, wide: bool = False) -> None:
        """Take it.

        Args:
            size: How large,
                in metres.
            *rest: Others.
            wide: Whether it is wide.

        Returns:
            Nothing.
        """

    lines = (inspect.getdoc(taking) or "").splitlines()
    arguments.tabulate(None, "function", "taking", taking, None, lines)
    text = "\n".join(lines)
    assert "   * - `size`\n     - ``int``\n     -\n     - How large, in metres.\n" in text
    assert "   * - `wide`\n     - ``bool``\n     - ``False``\n     - Whether it is wide.\n" in text
    assert "**Returns:** Nothing." in text


def test_the_pictures_are_what_the_views_draw_now() -> None:
    drawn = part_of_the_site("pictures").pictures()
    assert {path.name for path in (ROOT / "docs/pictures").glob("*.svg")} == set(drawn)
    for name, text in drawn.items():
        kept = (ROOT / "docs/pictures" / name).read_text(encoding="utf-8")
        assert kept == text, f"{name} has changed: draw it anew with python docs/site/pictures.py"


class Links(HTMLParser):
    """The targets of links and pictures of a page, and the names that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_is_built_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-d",
        str(tmp_path / "cache"),
    ]
    result = subprocess.run(
        [*build, "-c", "docs/site", ".", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, timeout=390
    )
    assert result.returncode == 0, result.stdout + result.stderr
    site = tmp_path / "site"
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    written = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > len(written)
    broken = [
        f"{path.relative_to(site)}: {target}"
        for path, links in pages.items()
        for target in links.targets
        if not re.match(r"\w+:|//", target) and not _leads(path, target, pages)
    ]
    assert broken == []
    assert "penstock.Pipeline" in pages[site / "docs/reference/pipeline.html"].anchors
    assert (site / "searchindex.js").exists()


def _leads(path: Path, target: str, pages: dict[Path, Links]) -> bool:
    name, _, anchor = target.partition("#")
    place = (path.parent / name.partition("?")[0]).resolve() if name else path
    if not place.exists():
        return False
    return not anchor or place not in pages or anchor in pages[place].anchors or anchor == "top"
