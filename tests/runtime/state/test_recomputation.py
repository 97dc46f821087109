"""State in plain attributes: a recomputed forward sees what it saw and changes nothing; a unit's own state is saved."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PeerFailure
from penstock.model.balance.proposal import Proposal
from penstock.model.replay.part import ReplayPart

MICROBATCHES = 4


CASES = list(product(("modules", "replayed"), ("1f1b", "zb-v"), ("always", "except_last")))


class Keeps(nn.Module):
    """A count, a memory that is replaced, a list, a dict, and an attribute that its first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.memory = nn.Linear(4, 4), 0, torch.zeros(4)
        self.log: list[float] = []
        self.sums = {"calls": [0.0]}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(1 / self.calls)
        self.sums["calls"][0] += 0.1
        y = torch.tanh(self.linear(x))
        out: Tensor = y / self.calls + self.memory + sum(self.log[-2:]) - self.sums["calls"][0]
        if self.calls > 1:
            out = out * self.made
        self.made = 1 - 0.1 * self.calls
        self.memory = y.detach().mean(0)
        return out

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "log": list(self.log), "memory": self.memory, "made": self.__dict__.get("made")}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.log, self.memory = state["calls"], list(state["log"]), state["memory"]
        self.sums = {"calls": [sum([0.1] * self.calls)]}
        if state["made"] is not None:
            self.made = state["made"]


class Skips(nn.Module):
    """Cut by its forward; one of its units has the state in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Keeps(), Keeps()
        self.inner = nn.Sequential(Keeps(), nn.Linear(4, 4))
        self.third = Keeps()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out: Tensor = self.last(self.third(self.inner(h) + h) + h)
        return out


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Skips() if kind == "replayed" else nn.Sequential(*[Keeps() for _ in range(4)])


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=drawn), torch.randn(8, 4, generator=drawn)


def plain(model: nn.Module, steps: int = 2) -> list[float]:
    x, y = batch()
    found = []
    for _ in range(steps):
        for row, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = F.mse_loss(model(row), target)
            (loss / MICROBATCHES).backward()
            found.append(loss.item())
    return found


def piped(model: nn.Module, kind: str, schedule: str, recompute: str, **options: Any) -> penstock.Pipeline:
    x, _ = batch()
    given = {"example": (x[:2],), "cut_options": penstock.CutOptions(method="replay")} if kind == "replayed" else {}
    return penstock.Pipeline(
        model,
        stages=4 if schedule == "zb-v" else 2,
        microbatches=MICROBATCHES,
        schedule=schedule,
        recompute=recompute,
        loss_fn=F.mse_loss,
        timeout=30,
        **{**given, **options},
    )


def check_case(kind: str, schedule: str, recompute: str) -> None:
    """Two steps; this process's gradients and state, and its losses, are those of the plain loop."""
    want, model = made(kind), made(kind)
    losses = plain(want)
    gradients = {name: parameter.grad for name, parameter in want.named_parameters()}
    x, y = batch()
    with piped(model, kind, schedule, recompute) as pipe:
        found = [loss for _ in range(2) for loss in pipe.step(x, target=y).losses or ()]
        assert isinstance(pipe.deployment.staged.parts[0], ReplayPart) == (kind == "replayed")
        if found:
            assert found == pytest.approx(losses, rel=1e-6)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name])
        states = {name: value for name, value in pipe.state_dict().items() if name.endswith("_extra_state")}
        assert states
        for name, state in states.items():
            torch.testing.assert_close(state, want.state_dict()[name])


@pytest.mark.parametrize(("kind", "schedule", "recompute"), CASES)
def test_a_recomputed_forward_sees_the_attributes_of_the_first_time(kind: str, schedule: str, recompute: str) -> None:
    check_case(kind, schedule, recompute)


def go_on(pipe: penstock.Pipeline, trained: list[float]) -> None:
    """The third step of a pipeline that has loaded the state after two."""
    x, y = batch()
    found = pipe.step(x, target=y).losses
    if found:
        assert list(found) == pytest.approx(trained[2 * MICROBATCHES :], rel=1e-6)


def check_saved(folder: str, kind: str) -> None:
    x, y = batch()
    trained = plain(made(kind), 3)
    with piped(made(kind), kind, "zb-v", "always") as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        state = pipe.state_dict()
        penstock.save(Path(folder) / kind, pipe)
        go_on(pipe, trained)
        pipe.load_state_dict({**pipe.state_dict(), **made_state(kind, state)})  # back by a step
        go_on(pipe, trained)
    with piped(made(kind), kind, "1f1b", "never") as other:  # another cut: other ranks have the units
        other.step(x, target=y)
        penstock.load(Path(folder) / kind, other)
        go_on(other, trained)


def made_state(kind: str, own: dict[str, Any]) -> dict[str, Any]:
    """A whole state, with this process's part of it."""
    return {**made(kind).state_dict(), **own}


def check_recut() -> None:
    x, y = batch()
    trained = plain(made("replayed"), 3)
    with piped(made("replayed"), "replayed", "1f1b", "always") as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        pipe.zero_grad()
        before = pipe.deployment.staged.cuts
        cuts = (1,) if before != (1,) else (2,)
        pipe.apply(Proposal(before, cuts, tuple(1.0 for _ in pipe.deployment.staged.weights), (2.0,), (1.0,)))
        assert pipe.deployment.staged.cuts == cuts
        go_on(pipe, trained)


def on_each_process(folder: str) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        check_case(*case)
    for kind in ("modules", "replayed"):
        check_saved(folder, kind)
    check_recut()


@pytest.mark.slow
def test_on_processes(tmp_path: Path) -> None:
    """`pipe.state_dict()` asked the units, while the copies of them that run had counted: it gave 0 calls."""
    on_processes(2, on_each_process, str(tmp_path))


@pytest.mark.parametrize("kind", ["modules", "replayed"])
def test_extra_state_is_saved_and_loaded_on_threads(kind: str, tmp_path: Path) -> None:
    check_saved(str(tmp_path), kind)


def test_a_new_cut_goes_on_with_the_attributes_of_its_units() -> None:
    check_recut()


def test_the_model_has_what_its_units_have_set_and_the_user_may_set_it() -> None:
    model = made("replayed")
    x, y = batch()
    with piped(model, "replayed", "1f1b", "never") as pipe:
        pipe.step(x, target=y)
        assert [model.first.calls, model.third.calls, model.last.calls] == [MICROBATCHES] * 3
        pipe.evaluate(x, target=y)
        assert model.first.calls == 2 * MICROBATCHES
        model.first.calls = 0
        pipe.step(x, target=y)
        assert (model.first.calls, model.last.calls) == (MICROBATCHES, 3 * MICROBATCHES)


@pytest.mark.parametrize("how", ["load_state_dict", "load"])
def test_a_state_is_loaded_after_a_step_that_failed(how: str, tmp_path: Path) -> None:
    """The unit itself had the loaded value already; its copy had gone on in the step that failed."""
    x, y = batch()
    trained = plain(made("replayed"), 1)
    with piped(made("replayed"), "replayed", "1f1b", "never") as pipe:
        state = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in pipe.state_dict().items()
        }
        penstock.save(tmp_path / "first", pipe)
        with pytest.raises(PeerFailure):
            pipe.step(x, target=y[:, :3])  # only the loss finds that it does not fit
        if how == "load":
            penstock.load(tmp_path / "first", pipe)
        else:
            pipe.load_state_dict(state)
        assert list(pipe.step(x, target=y).losses or ()) == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize("kind", ["modules", "replayed"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_gpipe(kind: str, checkpoint: str) -> None:
    want, model = made(kind), made(kind)
    plain(want)
    x, y = batch()
    pipe = penstock.GPipe(model, stages=2, chunks=MICROBATCHES, checkpoint=checkpoint)
    for step in range(2):
        loss = F.mse_loss(pipe(x), y)
        first = torch.autograd.grad(loss, list(pipe.parameters()), retain_graph=True)
        loss.backward()  # the forward of each microbatch runs for the third time
        if step == 0:
            torch.testing.assert_close([parameter.grad for parameter in pipe.parameters()], list(first))
    for one, other in zip(pipe.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(pipe.state_dict(), want.state_dict())
    pipe.close()
