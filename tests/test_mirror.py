"""A maintainer finds the tests of a module by its path.

The tests of `src/penstock/a/b/c.py` are in `tests/a/b/test_c.py`, and more of them may be in `test_c_*.py` beside it.
Where tests go through several modules of a folder at once, they are in the folder's own file instead:
`tests/a/b/test_b.py` or `tests/a/test_b.py`, also for folders inside of that one. (A whole room, such as `model`, is
too large for that.) A module without functions needs no tests.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "penstock"


def has_functions(module: Path) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, kinds) for node in ast.walk(ast.parse(module.read_text())))


def has_tests(place: Path) -> bool:
    """Whether there are tests for the module of that path below `src/penstock`, in its own or in a folder's file."""
    folder, name = TESTS / place.parent, place.stem
    if (folder / f"test_{name}.py").exists() or any(folder.glob(f"test_{name}_*.py")):
        return True
    nearest = [
        each for each in (folder, *folder.parents) if TESTS in each.parents and len(each.relative_to(TESTS).parts) > 1
    ] or [folder]
    return any(
        (each / f"test_{each.name}.py").exists() or each.with_name(f"test_{each.name}.py").exists() for each in nearest
    )


def test_each_module_has_its_tests_where_its_path_says() -> None:
    modules = [module for module in SOURCE.rglob("*.py") if not module.stem.startswith("__") and has_functions(module)]
    places = [module.relative_to(SOURCE) for module in modules]
    assert sorted(map(str, (place for place in places if not has_tests(place)))) == []
