"""Resume: bit for bit in the same layout, to rounding in any other, the optimizer included."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from checkpoint.saved_files import ONE
from processes import on_processes
from tiers import mostly_slow, slow_if, tiers
from torch import nn
from train_runs import LAYOUTS, Run

import penstock
from penstock.errors import CheckpointError, UsageError


def saved_and_next(folder: Path, name: str) -> list[float]:
    """Train three steps in a layout, save, and go on: the losses that a resumed run must have."""
    run = Run(**LAYOUTS[name])
    run.steps(3)
    penstock.save(folder / name, run.pipe, run.optimizer, step=3, extra={"from": name}, **run.parts())
    after = run.steps(3)
    run.close()
    return after


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str], list[float]]:
    """Each layout is trained and saved when it is first asked for; the losses that a resumed run must have."""
    return cache(partial(saved_and_next, folder))


FAST = [("zb-v", "one stage")]
PAIRS = [  # the slow tests have each layout as the source and as the target
    pytest.param(*pair, marks=[] if pair in FAST else slow_if("1f1b of 4" in pair))
    for pair in itertools.product(LAYOUTS, LAYOUTS)
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_resumes_from_every_other(
    source: str, target: str, folder: Path, trained: Callable[[str], list[float]]
) -> None:
    wanted = trained(source)
    run = Run(seed=5, **LAYOUTS[target])
    loaded = penstock.load(folder / source, run.pipe, run.optimizer, **run.parts())
    assert loaded.step == 3
    assert loaded.extra == {"from": source}
    losses = run.steps(3)
    run.close()
    assert loaded.same_layout == (source == target)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", mostly_slow(LAYOUTS, "zb-v"))
def test_the_same_layout_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Untied here: on threads, autograd adds the two gradients of a tied weight in the order in which they come."""
    run = Run(tied=False, **LAYOUTS[name])
    run.steps(3)
    penstock.save(tmp_path / "it", run.pipe, run.optimizer, step=3, **run.parts())
    after = run.steps(3)
    run.close()
    run = Run(seed=5, tied=False, **LAYOUTS[name])
    assert penstock.load(tmp_path / "it", run.pipe, run.optimizer, **run.parts()).same_layout
    assert run.steps(3) == after
    run.close()


def on_each_process(folder: str, after: dict[str, list[float]], ranks: int) -> dict[str, list[float]]:
    """Load what threads saved, in every layout that fits; save; load that again."""
    place = Path(folder)
    mine = {}
    for name, layout in LAYOUTS.items():
        if layout.get("ranks", layout["stages"]) != ranks:
            continue
        run = Run(seed=7, **layout)  # one for all: nothing of what it was loaded with before may stay
        for source in after:
            penstock.load(place / source, run.pipe, run.optimizer, **run.parts())
            again = run.steps(2)
            torch.testing.assert_close(torch.tensor(again), torch.tensor(after[source][:2]), rtol=2e-5, atol=1e-6)
        penstock.save(place / f"processes {name}", run.pipe, run.optimizer, step=3, **run.parts())
        mine[f"processes {name}"] = run.steps(3)
        run.close()
        run = Run(seed=8, **layout)
        loaded = penstock.load(place / f"processes {name}", run.pipe, run.optimizer, **run.parts())
        assert loaded.same_layout
        assert run.steps(3) == mine[f"processes {name}"]  # bit for bit
        run.close()
    return mine


@pytest.mark.parametrize("ranks", tiers(4, 3))
def test_threads_and_processes_resume_from_each_other(
    ranks: int, folder: Path, trained: Callable[[str], list[float]]
) -> None:
    after = {name: trained(name) for name in LAYOUTS}
    told = on_processes(ranks, on_each_process, str(folder), after, ranks)
    assert all(each == told[0] for each in told)
    assert told[0]
    for target in LAYOUTS:
        run = Run(seed=5, **LAYOUTS[target])
        for source, losses in told[0].items():
            penstock.load(folder / source, run.pipe, run.optimizer, **run.parts())
            torch.testing.assert_close(torch.tensor(run.steps(2)), torch.tensor(losses[:2]), rtol=2e-5, atol=1e-6)
        run.close()


def test_what_does_not_fit_is_listed_at_once(run: Run, saved: Path) -> None:
    other = penstock.Pipeline(nn.Sequential(nn.Linear(3, 3)), stages=1, microbatches=1)
    with pytest.raises(
        CheckpointError, match=r"(?s)does not fit.*50 of its tensors are not in the model: .*0\.weight is not in it"
    ):
        penstock.load(saved, other)
    half = Run(**ONE)
    for module in half.pipe.deployment.ranks.modules().values():
        module.double()
    with pytest.raises(CheckpointError, match=r"embed.weight is float32 in it and float64 in the model"):
        penstock.load(saved, half.pipe)


def test_a_wrong_optimizer_or_a_missing_part_is_refused(run: Run, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state of AdamW, and optimizer= is SGD"):
        penstock.load(saved, run.pipe, torch.optim.SGD(run.pipe.parameters()))
    with pytest.raises(CheckpointError, match="saved without scheduler="):
        penstock.load(saved, run.pipe, scheduler=run.scheduler)
    penstock.save(tmp_path / "bare", run.pipe)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        penstock.load(tmp_path / "bare", run.pipe, run.optimizer)
    with pytest.raises(UsageError, match="does not own"):
        penstock.save(tmp_path / "y", run.pipe, torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(UsageError, match="not a penstock"):
        penstock.save(tmp_path / "y", nn.Linear(2, 2))  # type: ignore[arg-type]
