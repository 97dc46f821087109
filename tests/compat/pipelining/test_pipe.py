"""A `Pipe` whose stages share what they call: one weight on all of them, where torch makes copies that drift apart."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as theirs
from tiers import mostly_slow
from torch import Tensor, nn

import penstock
import penstock.compat.pipelining as ours
from penstock.compat.pipelining import ScheduleInterleaved1F1B, pipe_split, pipeline
from penstock.errors import FallbackWarning, UsageError


class Aliased(nn.Module):
    """Two names for each of two things, one on each side of the split."""

    def __init__(self) -> None:
        super().__init__()
        self.right = self.left = nn.Parameter(torch.randn(4, 4))
        self.after = self.before = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.before(torch.mm(x, self.left)))
        pipe_split()
        out: Tensor = self.after(torch.mm(x, self.right))
        return out


class Looped(nn.Module):
    """One block again and again, and a head at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(self.block(x))
            pipe_split()
        out: Tensor = self.head(x)
        return out


def check(model: nn.Module, owned: list[set[str]]) -> None:
    plain, x, y = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 4)
    pipe = pipeline(model, (x[:2],))
    assert [set(pipe.get_stage_module(index).state_dict()) for index in range(pipe.num_stages)] == owned
    stages = [pipe.build_stage(index, "cpu") for index in range(pipe.num_stages)]
    schedule: Any = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(2):
        schedule.step(x, target=y)
        nn.functional.mse_loss(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
    schedule.close()


def test_a_stage_that_has_only_what_was_used_before_is_a_stage() -> None:
    torch.manual_seed(0)
    held = [{"left", "right", "before.weight", "before.bias"}, {"left", "after.weight", "after.bias"}]
    with pytest.warns(FallbackWarning, match="torch.export graph"):  # the places are parameters, of no unit
        check(Aliased(), held)


def test_each_round_of_a_loop_is_a_stage() -> None:
    torch.manual_seed(0)
    block = {"block.weight", "block.bias"}
    check(Looped(), [block, block, block, {"head.weight", "head.bias"}])


class Chain(nn.Module):
    def __init__(self, marked: Any = None) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)
        self.marked = marked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            if number == 2 and self.marked is not None:
                self.marked()
            x = torch.relu(layer(x))
        out: torch.Tensor = self.norm(x)
        return out


def owned(pipe: ours.Pipe) -> list[list[str]]:
    return [
        sorted({name.rpartition(".")[0] for name in pipe.get_stage_module(i).state_dict()})
        for i in range(pipe.num_stages)
    ]


def test_models_are_cut_before_and_after_modules_and_left_as_they_were() -> None:
    """torch rewrites the forwards of the user's modules for good, and its probing changes their buffers."""
    model = Chain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spec = {"layers.1": ours.SplitPoint.END, "layers.3": theirs.SplitPoint.BEGINNING}
    pipe = ours.pipeline(model, (torch.randn(3, 4),), split_spec=spec)  # type: ignore[arg-type]
    assert owned(pipe) == [["embed", "layers.0", "layers.1"], ["layers.2"], ["layers.3", "norm"]]
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    x = torch.randn(3, 4)
    torch.testing.assert_close(pipe(x)[0], model(x))


@pytest.mark.parametrize("mark", [ours.pipe_split, theirs.pipe_split])
def test_marks_in_a_forward_cut(mark: Any) -> None:
    pipe = ours.pipeline(Chain(mark), (torch.randn(3, 4),))
    assert owned(pipe) == [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm"]]
    assert ours.Pipe.from_tracing(Chain(mark), (torch.randn(3, 4),)).num_stages == 2


class Loose(nn.Module):
    """Parameters of its own between the splits, one of them used on both sides."""

    def __init__(self, mark: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.lin1, self.lin2 = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mark = mark

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.mm(x, self.first)
        skip = x
        x = torch.relu(x + y)
        self.mark()
        x = self.lin1(torch.mm(x, self.first))
        self.mark()
        x = torch.mm(torch.relu(x) + skip, self.second)
        self.mark()
        return torch.relu(self.lin2(x))


@pytest.mark.parametrize("mark", mostly_slow([ours.pipe_split, theirs.pipe_split], ours.pipe_split))
def test_parameters_beside_modules_begin_stages_too(mark: Any) -> None:
    torch.manual_seed(0)
    model, x, y = Loose(mark), torch.randn(8, 4), torch.randn(8, 4)
    pipe = ours.pipeline(model, (x[:2], y[:2]))
    assert pipe.num_stages == 4
    held = [set(pipe.get_stage_module(index).state_dict()) for index in range(4)]
    assert held[0] == {"first"}
    assert held[1] >= {"lin1.weight", "lin1.bias"}
    assert held[2] == {"second"}
    assert held[3] == {"lin2.weight", "lin2.bias"}
    torch.testing.assert_close(pipe(x, y)[0], model(x, y))
    loss = nn.functional.mse_loss(model(x, y), torch.ones(8, 4))
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    with pytest.warns(FallbackWarning):
        whole = penstock.Pipeline(model, microbatches=2, loss_fn=nn.functional.mse_loss, **pipe.cut)
    with whole:
        found = whole.step(x, y, target=torch.ones(8, 4)).loss
    torch.testing.assert_close(found, loss.detach())
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_pipe_without_splits_is_one_stage() -> None:
    pipe = ours.pipeline(Chain(), (torch.randn(3, 4),))
    schedule = ours.ScheduleGPipe(pipe.build_stage(0, "cpu"), 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    assert schedule.step(x, target=y).shape == (6, 4)
    module = pipe.get_stage_module(0)
    assert all(p.grad is not None for p in module.parameters())
    module.eval()
    assert not pipe.model.norm.training
    with pytest.raises(UsageError, match="runs in a schedule"):
        module(x)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"layer.1": ours.SplitPoint.END}, "Chain has no module 'layer.1'"),
        ({"layers.1": "END"}, "pass SplitPoint.BEGINNING or SplitPoint.END"),
        ({"norm": ours.SplitPoint.END}, "nothing with parameters is used between split 1 and the next"),
    ],
)
def test_splits_that_cannot_be_are_errors(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours.pipeline(Chain(), (torch.randn(3, 4),), split_spec=spec)
    with pytest.raises(UsageError, match="pass split_spec"):
        ours.pipeline(Chain(), (torch.randn(3, 4),), split_policy=print)
    with pytest.raises(UsageError, match="Invalid stage index 1"):
        ours.pipeline(Chain(), (torch.randn(3, 4),)).get_stage_module(1)
