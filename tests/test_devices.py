"""The package names no kind of accelerator, and makes its own tensors where it wants them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch.utils import _device as default_device

SOURCE = Path(__file__).resolve().parents[1] / "src" / "penstock"
NAMES = re.compile(r"cuda|nccl|\bxpu\b|\bmps\b|\bnpu\b", re.IGNORECASE)

# Where a kind of accelerator is named all the same, how often, and why.
EXCUSED = {
    "checkpoint/generators.py": (2, "checkpoints of earlier versions have these states under that name"),
    "devices.py": (2, "mps keeps its one generator in a place of its own"),
    "gpipe/arguments.py": (2, "a number is a GPU's where torch has no accelerator; and the example in the error"),
    "gpipe/gpipe.py": (3, "every module has this method"),
    "model/original/placeholders.py": (1, "an attribute of every tensor"),
    "parallel/axis_link.py": (1, "a word in errors of torch"),
    "pipeline/arguments.py": (1, "the example in the error"),
    "pipeline/devices.py": (1, "the error has the word that users of that kind know"),
    "planner/profile.py": (3, "torch keeps a switch there that holds on CPUs too"),
}


def code_of(file: Path) -> Iterator[str]:
    """The words of a file's code, without comments and docstrings."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
        for field in ("id", "attr", "value", "name", "arg"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word


def test_no_kind_of_accelerator_is_named_but_where_that_is_excused() -> None:
    found = {
        str(file.relative_to(SOURCE)): len([word for word in code_of(file) if NAMES.search(word)])
        for file in SOURCE.rglob("*.py")
    }
    assert {file: count for file, count in found.items() if count} == {
        file: count for file, (count, _) in EXCUSED.items()
    }


def test_every_tensor_that_is_ours_is_made_on_a_device_of_our_choice() -> None:
    """Otherwise `torch.set_default_device("meta")` of a user takes a message's memory away, and a step hangs."""
    factories = {factory.__name__ for factory in default_device._device_constructors()}
    found = [
        f"{file.relative_to(SOURCE)}:{node.lineno} torch.{node.func.attr}"
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) in {("torch", name) for name in factories}
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]
    assert found == []
