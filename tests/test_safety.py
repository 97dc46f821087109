"""What could run somebody else's code: every use of it in the source, with the reason why it is safe."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "penstock"

# (file, what is called) -> why no stranger's bytes get there
ALLOWED = {
    ("runtime/transport/layout/encoding.py", "pickle.dumps"): "writing runs nothing of the reader's",
    (
        "runtime/transport/layout/encoding.py",
        "pickle.loads",
    ): "values that the user's own stage passes and that are not plain; "
    "signed with the run's secret where there is one",
    ("model/export/capture.py", "eval"): "guards that torch.export wrote in this process, of the user's own model",
}
CALLS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
METHODS = {
    ("torch", "load"),
    ("dist", "all_gather_object"),
    ("dist", "broadcast_object_list"),
    ("dist", "gather_object"),
    ("dist", "scatter_object_list"),
    ("dist", "send_object_list"),
    ("dist", "recv_object_list"),
    ("yaml", "load"),
}


def uses(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.add(node.func.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pair = (node.value.id, node.attr)
            if pair in METHODS or (node.value.id in MODULES and node.attr not in ("PicklingError", "UnpicklingError")):
                found.add(".".join(pair))
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_use_of_what_could_run_code_has_a_reason() -> None:
    found = {(str(path.relative_to(SOURCE)), use) for path in sorted(SOURCE.rglob("*.py")) for use in uses(path)}
    assert found == set(ALLOWED)
