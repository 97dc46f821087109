"""The core works in a copy of the package that has no folder of a tool, and says which one is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rooms import CORE, TOOLS
from warm import warm_commands

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "penstock"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of the core's rooms alone."""
    folder = tmp_path_factory.mktemp("core")
    copy = folder / "penstock"
    shutil.copytree(SOURCE, copy)
    for room in {room.partition(".")[0] for room in TOOLS}:
        path = copy / room
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    return folder


FRESH = """
import sys
for name in [each for each in sys.modules if each.partition(".")[0] == "penstock"]:
    del sys.modules[name]
sys.path.insert(0, ".")
"""


def run_fork(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Python that has torch loaded, as a fork of a process has that has, and loads the `penstock` of a folder."""
    (folder / "program.py").write_text(FRESH + code)
    command = [str(warm_commands() / "python"), "-W", "error", "program.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def run_with(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python whose `penstock` is the core's copy."""
    environment = {**os.environ, "PYTHONPATH": str(core)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=core)


def modules_of(core: Path) -> Iterator[str]:
    for path in sorted((core / "penstock").rglob("*.py")):
        yield ".".join(path.relative_to(core).with_suffix("").parts).removesuffix(".__init__")


STEPS = """
import copy, torch, penstock
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
plain = copy.deepcopy(model)
pipe = penstock.Pipeline(model, stages=2, microbatches=4, schedule="zb-h1", loss_fn=nn.functional.mse_loss)
pipe.describe()
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
for _ in range(2):
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    result = pipe.step(x, target=y)
    for part, target in zip(x.chunk(4), y.chunk(4)):
        (nn.functional.mse_loss(plain(part), target) / 4).backward()
    for trained, expected in zip(model.parameters(), plain.parameters()):
        assert torch.equal(trained.grad, expected.grad)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
pipe.close()
"""


def test_every_module_of_the_core_is_imported_and_a_pipeline_trains_two_steps(core: Path) -> None:
    names = list(modules_of(core))
    rooms = {name.split(".")[1] for name in names if "." in name}
    assert rooms == {room.partition(".")[0] for room in CORE}
    here = f"import penstock; assert penstock.__path__ == [{str(core / 'penstock')!r}]"
    ended = run_fork(core, "\n".join([here, *(f"import {name}" for name in names), STEPS]))
    assert ended.returncode == 0, ended.stderr


MISSING = """
import penstock
from penstock.errors import UsageError
from penstock.schedule import Costs, build, simulate

asked = {
    "penstock.schedule.search": lambda: penstock.schedule.search(2, 2),
    'build("auto")': lambda: build("auto", 2, 2),
    "build with costs=": lambda: build("zb-v", 2, 2, costs=Costs()),
    "Costs.from_timeline": lambda: Costs.from_timeline(simulate(build("1f1b", 2, 2))),
    "penstock.plan": lambda: penstock.plan,
}
for what, ask in asked.items():
    try:
        ask()
    except UsageError as error:
        print(what, "|", error)
"""


def test_what_a_tool_makes_is_refused_with_the_name_of_the_tool(core: Path) -> None:
    ended = run_with(core, "-c", MISSING)
    assert ended.returncode == 0, ended.stderr
    refused = dict(line.split(" | ") for line in ended.stdout.splitlines())
    assert len(refused) == 5
    for what, error in refused.items():
        module = "penstock.planner" if what == "penstock.plan" else "penstock.tools"
        assert error.startswith(f"{what} is the work of {module}.")
        assert f"this copy of Penstock has no {module}" in error
        assert error.endswith("install the whole package: pip install penstock")


def test_a_library_that_a_tool_misses_is_reported_as_it_is(tmp_path: Path) -> None:
    """Of a tool that is there, another error is the one that helps."""
    (tmp_path / "penstock").symlink_to(SOURCE)
    ended = run_fork(tmp_path, "sys.modules['greenlet'] = None; import penstock; penstock.rehearse")
    assert "greenlet" in ended.stderr
    assert "this copy of Penstock" not in ended.stderr


def test_every_module_that_the_core_asks_for_by_name_exists() -> None:
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    asked = {name for text in texts for name in re.findall(r"\btool\(\s*\"penstock\.([\w.]+)\"", text)}
    assert len(asked) > 3
    places = [SOURCE.joinpath(*name.split(".")) for name in asked]
    assert [place for place in places if not (place.is_dir() or place.with_suffix(".py").is_file())] == []


TESTED = (
    "schedule/lowering",
    "schedule/proof",
    "runtime/messages",
    "parallel/group",
    "runtime/engine",
    "runtime/backward",
    "pipeline",
)
FROM_TOOLS = ("GPipe", "parity", "plan", "rehearse", "schedule.search", "schedule.lower_bound")
USED = [f"penstock.{name}" for name in (*TOOLS, *FROM_TOOLS)]
USED += ["lower_bound", "order_microbatches", "from_timeline", "search(", "searched_cut", '"auto"']


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tests_of_the_core_pass_without_the_tools(core: Path) -> None:
    """Those of its files that name nothing of a tool."""
    files = [path for folder in TESTED for path in sorted((TESTS / folder).rglob("test_*.py"))]
    texts = {str(path): path.read_text() for path in files}
    alone = [path for path, text in texts.items() if not any(name in text for name in USED)]
    assert len(alone) > 0.8 * len(files)
    options = [
        "-q",
        "-c",
        str(TESTS.parent / "pyproject.toml"),
        "-k",
        "not (for_their_sizes or equal_sizes or steady or v_schedule_trains or resumes_with_the_same_losses)",
    ]
    ended = run_with(core, "-m", "pytest", *options, *alone)
    assert ended.returncode == 0, ended.stdout
