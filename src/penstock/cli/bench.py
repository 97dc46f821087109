"""`penstock bench`: the comparisons with peers, listed, or one of them run on this machine.

A bench is a file in `bench/` that defines `main`; the others there are what they share. Its options
are its own: all that stands behind its name goes to it as it is, and what is printed and the exit
code come from it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import complain, guarded, write, write_json
from penstock.cli.programs import find_folder, places_of, started, title_of, tree_of, unknown, write_list
from penstock.cli.source import AsJson
from penstock.errors import UsageError

PLACES = places_of("bench", "bench")

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="A bench's name; without it, the list.", show_default=False)
]
Rest = Annotated[
    list[str] | None,
    typer.Argument(metavar="OPTION", help="Options of the bench; NAME --help lists them.", show_default=False),
]


@guarded
def bench(name: Name = None, rest: Rest = None, as_json: AsJson = False) -> None:
    """Measure Penstock beside its peers on this machine: list the benches, or run one.

    Every bench takes --quick (little work: that it runs, not how fast) and --json (one document on stdout; the tables
    then go to stderr). Give its options after its name. docs/explanations/performance.md has figures and says
    what they mean.
    """
    benches = _benches()
    if name is None:
        _list(benches, as_json)
        return
    path = benches.get(name.lower().removesuffix(".py"))
    if path is None:
        raise unknown("penstock", "bench", name, list(benches))
    _check_needs(path)
    raise typer.Exit(_run(path, [*(["--json"] if as_json else []), *(rest or ())]))


def _benches() -> dict[str, Path]:
    """Return every bench by its name, in the alphabet's order."""
    folder = find_folder(PLACES, "common.py", "the benches")
    return {path.stem: path for path in sorted(folder.glob("*.py")) if _defines_main(path)}


def _defines_main(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree_of(path).body)


def _list(benches: dict[str, Path], as_json: bool) -> None:
    titles = {name: title_of(path) for name, path in benches.items()}
    if as_json:
        write_json([{"name": name, "title": titles[name], "path": str(path)} for name, path in benches.items()])
        return
    write_list(list(titles.items()))
    write("\nrun one: penstock bench NAME; in seconds, to see that it runs: penstock bench NAME --quick")
    write("its options: penstock bench NAME --help; for machines: penstock bench NAME --json")


def _run(path: Path, options: list[str]) -> int:
    with started([sys.executable, str(path), *options]) as program:
        code = program.wait()
    if code < 0:
        complain(f"the bench {path.stem} was ended by {signal.Signals(-code).name}")
        return 128 - code
    return code


def _check_needs(path: Path) -> None:
    """Refuse a bench that imports what is not there, before it ends in a traceback."""
    missing = sorted(name for name in _imported(path) if importlib.util.find_spec(name) is None)
    if missing:
        several = len(missing) > 1
        wanted = " ".join(shlex.quote(_requirement(name)) for name in missing)
        raise UsageError(
            f"the bench {path.stem} needs {' and '.join(missing)}, which {'are' if several else 'is'} not installed; "
            f"run {sys.executable} -m pip install {wanted}"
        )


def _imported(path: Path) -> set[str]:
    """Return the packages that a bench imports wherever in it, itself or through its neighbours."""
    found: set[str] = set()
    files = [path]
    for file in files:
        for node in ast.walk(tree_of(file)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            for name in (module.partition(".")[0] for module in modules):
                beside = path.with_name(f"{name}.py")
                if not beside.is_file():
                    found.add(name)
                elif beside not in files:
                    files.append(beside)
    return found


def _requirement(name: str) -> str:
    """Return what to ask pip for: the versions that Penstock declares, where it does."""
    try:
        declared = importlib.metadata.requires("penstock") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source
        declared = []
    for text in declared:
        wanted = text.partition(";")[0].strip()
        if re.split(r"[^\w.-]", wanted)[0].replace("-", "_").lower() == name.lower():
            return wanted
    return name
