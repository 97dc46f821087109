"""What could run somebody else's code: every use of it in the source, with the reason why it is safe."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "penstock"

# (file, what is called) -> why no stranger's bytes get there
ALLOWED = {
    ("runtime/transport/layout/encoding.py", "pickle.dumps"): "writing runs nothing of the reader's",
    (
        "runtime/transport/layout/encoding.py",
        "pickle.loads",
    ): "values that the user's own stage passes and that are not plain, from a peer that has proved itself",
    ("tool.py", "importlib.import_module"): "Penstock's own modules, named in its source",
    (
        "tools/train/config/source.py",
        "importlib.import_module",
    ): "what a configuration names as module:function",
    (
        "tools/train/run/baseline.py",
        "importlib.import_module",
    ): "libraries that Penstock names for a process of its own, to see what they take",
    (
        "integrations/transformers/trainer.py",
        "torch.load",
    ): "with weights_only=True: the optimizer's state, in the file that transformers' Trainer keeps it in",
    ("model/export/capture.py", "eval"): "guards that torch.export wrote in this process, of the user's own model",
}
ERRORS = {"PickleError", "PicklingError", "UnpicklingError"}
CALLS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
LOADERS = {"torch", "serialization", "jit", "export", "hub", "np", "numpy", "yaml", "dcp"}  # whose load() may unpickle
ANYWHERE = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "import_module",
    "Unpickler",
}


def uses(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.add(node.func.id)
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
            is_loader = node.attr == "load" and owner in LOADERS
            in_module = owner in MODULES and node.attr not in ERRORS
            if is_loader or in_module or node.attr in ANYWHERE:
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").rpartition(".")[2]
            for name in (alias.name for alias in node.names):
                if (
                    (module in MODULES and name not in ERRORS)
                    or name in ANYWHERE
                    or (name == "load" and module in LOADERS)
                ):
                    found.add(f"{module}.{name}")
    return found


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import pickle\npickle.loads(b'')", "pickle.loads"),
        ("from pickle import loads", "pickle.loads"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import torch\ntorch.jit.load('x')", "jit.load"),
        ("from torch import load", "torch.load"),
        ("import torch.distributed as d\nd.all_gather_object([], 1)", "d.all_gather_object"),
        ("from torch.distributed import broadcast_object_list", "distributed.broadcast_object_list"),
        ("exec('x')", "exec"),
    ],
)
def test_a_use_is_found_however_it_is_written(source: str, use: str) -> None:
    assert uses(source) == {use}


def test_every_use_of_what_could_run_code_has_a_reason() -> None:
    found = {
        (str(path.relative_to(SOURCE)), use) for path in sorted(SOURCE.rglob("*.py")) for use in uses(path.read_text())
    }
    assert found == set(ALLOWED)
