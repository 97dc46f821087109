"""Names that begin with an underscore: for their own file, and for subclasses of its classes."""

from __future__ import annotations

import ast
from pathlib import Path

# Private names of torch, Python and Lightning that files of ours happen to use as well.
FOREIGN = {"_base", "_buffers", "_functions", "_layout", "_make", "_modules", "_optimizer", "_parameters", "_version"}
# The names here are those of torch.distributed.pipelining, where they are private too.
MIRRORED = "compat/pipelining/"
SOURCE = Path(__file__).resolve().parents[1] / "src" / "penstock"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined_in(tree: ast.AST) -> set[str]:
    """The private names that a file gives to functions, classes, variables and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_own(value: ast.expr) -> bool:
    """Whether this is the object or the class itself: its private names may be those of a base class elsewhere."""
    is_super = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
    return is_super or (isinstance(value, ast.Name) and value.id in ("self", "cls"))


def used_from_elsewhere(tree: ast.AST) -> list[tuple[int, str]]:
    """The private names of other objects and modules that a file reads or writes, each with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            found += [(node.lineno, alias.name) for alias in node.names if is_private(alias.name)]
    return found


def test_no_file_uses_a_private_name_of_another() -> None:
    """Names that no file of Penstock defines are of other libraries, and not looked at."""
    files = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    own = {file: defined_in(tree) for file, tree in files.items()}
    ours = set().union(*own.values()) - FOREIGN
    assert [
        f"{file}:{line}: {name}"
        for file, tree in files.items()
        if not file.startswith(MIRRORED) and file != "runtime/engine/executor.py"
        for line, name in used_from_elsewhere(tree)
        if name in ours and name not in own[file]
    ] == []


def test_the_rule_sees_attributes_and_imports_of_other_files() -> None:
    text = """
from penstock.rules import _check
class Part(Base):
    def run(self, other):
        self._done = super()._run()
        return other._left
"""
    tree = ast.parse(text)
    assert used_from_elsewhere(tree) == [(2, "_check"), (6, "_left")]
    assert defined_in(tree) == {"_done"}
