"""The package names no kind of accelerator, and makes its own tensors where it wants them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerator.harness import NAMES, on_device
from tiers import mostly_slow
from torch.utils import _device as default_device

SOURCE = Path(__file__).resolve().parents[1] / "src" / "penstock"
KINDS = re.compile(r"cuda|nccl|\bxpu\b|\bmps\b|\bnpu\b", re.IGNORECASE)

# Where a kind of accelerator is named all the same, how often, and why.
EXCUSED = {
    "checkpoint/generators.py": (2, "checkpoints of earlier versions have these states under that name"),
    "devices.py": (4, "mps keeps its one generator in a place of its own; a switch of CUDA alone"),
    "tools/train/launch/environment.py": (1, "a switch of CUDA alone"),
    "tools/doctor/examine.py": (1, "the example in the error"),
    "tools/doctor/machine.py": (10, "vendors' own tools and versions, for a report"),
    "compat/gpipe/arguments.py": (
        2,
        "a number is a GPU's where torch has no accelerator; and the example in the error",
    ),
    "compat/gpipe/gpipe.py": (3, "every module has this method"),
    "runtime/transport/distributed/device_link.py": (1, "which backends of torch need the ranks of a communicator"),
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
        str(file.relative_to(SOURCE)): len([word for word in code_of(file) if KINDS.search(word)])
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


def answers() -> dict[str, object]:
    import torch

    from penstock import devices

    torch.accelerator.set_device_index(3)
    name = devices.accelerator()
    assert name is not None
    first, second = (devices.generator_of(torch.device(name, index)) for index in range(2))
    first.manual_seed(1)
    second.manual_seed(1)
    at = torch.device(name, 0)
    torch.rand(1, device=at)
    moved = not torch.equal(first.get_state(), second.get_state())
    return {
        "kinds": devices.device_types(),
        "backends": devices.backends(),
        "current": str(devices.indexed(name)),
        "named": str(devices.indexed(at)),
        "generators": len(devices.generators()),
        "of its own": moved,
        "copied": devices.to_device({"a": [torch.ones(2), 3]}, at)["a"][0].device.type,
    }


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_what_there_is_of_an_accelerator_is_asked_of_torch(name: str) -> None:
    assert on_device(answers, name=name).value == {
        "kinds": ("cpu", name),
        "backends": f"cpu:gloo,{name}:{'nccl' if name == 'cuda' else 'pretendccl'}",
        "current": f"{name}:3",
        "named": f"{name}:0",
        "generators": 8,
        "of its own": True,
        "copied": name,
    }
