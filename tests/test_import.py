"""Importing Penstock: what it loads, and which room may import which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from rooms import FOLDERS_OF_ROOMS, ROOMS

SOURCE = Path(__file__).resolve().parents[1] / "src" / "penstock"


@pytest.mark.parametrize("module", ["penstock", "penstock.errors", "penstock.schedule"])
def test_importing_it_imports_neither_torch_nor_numpy(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


@cache
def loaded_in_turn(*statements: str) -> list[set[str]]:
    """The modules that a fresh process has loaded after each of these."""
    code = "import sys, penstock\n" + "".join(f"{each}\nprint(*sys.modules)\n" for each in statements)
    done = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


# What loads little comes first: each is asked what is loaded by then.
IN_TURN = ("import penstock.tools.train.launch.launch", "penstock.Pipeline", "penstock.save")


@pytest.mark.slow
def test_integrations_are_loaded_by_those_who_ask_for_them() -> None:
    loaded = loaded_in_turn(*IN_TURN)[-1]
    assert "penstock.checkpoint" in loaded
    assert not {"transformers", "accelerate", "lightning", "penstock.integrations"} & loaded


@pytest.mark.slow
def test_a_pipeline_loads_neither_dtensor_nor_fsdp_before_it_needs_them() -> None:
    """Together they take as long to import as torch itself, and few pipelines are sharded or spread."""
    loaded = loaded_in_turn(*IN_TURN)[1]
    assert "penstock.pipeline" in loaded
    assert not {"torch.distributed.tensor", "torch.distributed.fsdp", "sympy"} & loaded


def test_a_launcher_loads_no_pipeline_and_no_checkpoint() -> None:
    """It only waits for its ranks, whose server loads them."""
    loaded = loaded_in_turn(*IN_TURN[:1])[0]  # The slow tests load the others too.
    assert "penstock.tools.train.launch.launch" in loaded
    assert not {"penstock.pipeline", "penstock.checkpoint.checkpointer", "torch.distributed.tensor"} & loaded


def test_schedules_work_from_end_to_end_without_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None  # an import of it would now fail
from penstock.schedule import build, lower, simulate, verify
schedule = build("zb-v", ranks=4, microbatches=8)
verify(lower(schedule, reduce=True, window=2))
print(schedule.draw(), simulate(schedule).makespan)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True).returncode == 0


@cache
def imports(path: Path) -> list[str]:
    """The dotted names that a file loads, wherever in it; names for the type checker alone load nothing."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
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


@cache
def room_of(name: str) -> str:
    """Return the room of a module, the innermost one, by its dotted name below the package."""
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len)


@cache
def modules() -> list[tuple[str, Path]]:
    return list(_modules())


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if name not in ("__init__", *FOLDERS_OF_ROOMS):  # the package itself is lazy
            yield name, path


def test_every_module_is_in_a_room() -> None:
    assert {room_of(name) for name, _ in modules()} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    """Above it in the list of ARCHITECTURE.md. Imports for types alone are free, except in `schedule`."""
    above = ROOMS[: ROOMS.index(room) + 1]
    for name, path in modules():
        if room_of(name) == room:
            if room == "schedule" and name != room:  # whose own names a tool may make
                assert "TYPE_CHECKING" not in path.read_text()  # nothing above it, not even by name
            for imported in imports(path):
                root, _, rest = imported.partition(".")
                if root == "penstock" and rest:
                    assert room_of(rest) in above, f"{path} imports {imported}"


@pytest.mark.parametrize(
    "room",
    ["model", "parallel", "compat", "compat.gpipe", "runtime.optim", "parallel.group", "runtime.messages", "cli"],
)
def test_an_import_inside_of_a_function_says_what_it_saves(room: str) -> None:
    """In a comment beside it, or beside or above the first of several."""
    for name, path in modules():
        text = path.read_text() if room_of(name) == room else ""
        lines, inside = text.splitlines(), set()
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                inside |= {each.lineno for each in ast.walk(function) if isinstance(each, ast.Import | ast.ImportFrom)}
        for number in inside:
            first = number
            while first - 1 in inside:
                first -= 1
            assert any("# " in line for line in lines[first - 2 : number]), f"{path}:{number}"


def test_the_schedule_layer_needs_nothing_but_python_and_numpy() -> None:
    found = sorted((SOURCE / "schedule").rglob("*.py"))
    assert found
    for path in found:
        for name in imports(path):
            root = name.partition(".")[0]
            assert root in ("penstock", "numpy") or root in sys.stdlib_module_names, f"{path} imports {name}"


def test_the_page_on_how_it_is_built_names_files_that_there_are() -> None:
    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text()
    paths = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    tests = {name for name in named if name.startswith("tests/")}
    assert [name for name in tests if not (SOURCE.parents[1] / name).is_file()] == []
    assert len(named) > 30
    for name in named - tests:
        assert any(f"/{path}".endswith(f"/{name}") for path in paths), name
    rooms = {room.partition(".")[0] for room in ROOMS} - {"__main__"}
    assert [room for room in rooms if f"`{room}" not in page] == []
