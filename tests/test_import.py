"""Importing Penstock: what it loads, and which layer may know which."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "penstock"

# Each layer, and the layers below it that it may import.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "schedule": {"errors"},
    "model": {"errors", "schedule"},
    "runtime": {"errors", "schedule", "model"},
    "parallel": {"errors", "schedule", "model", "runtime"},
    "train": {"errors", "schedule", "model", "runtime", "parallel", "pipeline", "view"},
    "view": {"errors", "schedule", "model", "runtime", "pipeline"},
}


@pytest.mark.parametrize("module", ["penstock", "penstock.errors", "penstock.schedule"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_schedules_work_from_end_to_end_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # an import of it would now fail
from penstock.schedule import build, lower, simulate, verify
schedule = build("zb-v", ranks=4, microbatches=8)
verify(lower(schedule, reduce=True, window=2))
print(schedule.draw(), simulate(schedule).makespan)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True).returncode == 0


def imports(path: Path) -> Iterator[str]:
    """The dotted names that a file loads, wherever in it; names for the type checker alone load nothing."""
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("layer", BELOW)
def test_imports_point_down_only(layer: str) -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        if layer_of(path) == layer:
            if layer == "schedule":
                assert "TYPE_CHECKING" not in path.read_text()  # nothing above it, not even by name
            for name in imports(path):
                root, _, rest = name.partition(".")
                if root == "penstock":
                    assert rest.split(".")[0] in BELOW[layer] | {layer}, f"{path} imports {name}"


def test_the_schedule_layer_is_pure_python() -> None:
    found = sorted((SOURCE / "schedule").rglob("*.py"))
    assert found
    for path in found:
        for name in imports(path):
            root = name.partition(".")[0]
            assert root == "penstock" or root in sys.stdlib_module_names, f"{path} imports {name}"
