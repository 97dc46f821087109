"""A cut that changes while training goes on must not show in the losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import on_processes
from tiers import mostly_slow
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError, UsageError
from penstock.model.balance.proposal import Proposal
from penstock.schedule import Costs, simulate


class Fades(nn.Module):
    """Goes by a count of its calls that is no buffer."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return x * (1 + 1 / (1 + self.calls))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def block() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.1), layer, Fades())


class Net(nn.Module):
    """Six blocks, a tied head, a layer with two names, dropout, state of all kinds: what a cut could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(block() for _ in range(6))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def losses(net: nn.Module, move_after: int | None, stages: int, schedule: str = "1f1b") -> list[float]:
    """Six steps of AdamW; after `move_after` of them two blocks change hands."""
    ids = torch.arange(40).reshape(8, 5) % 16
    pipe = penstock.Pipeline(
        net, stages=stages, microbatches=4, schedule=schedule, loss_fn=loss_fn, example=(ids[:2],), seed=3, timeout=30
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    found = []
    for step in range(6):
        found.append(pipe.step(ids, target=ids).loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == move_after:
            cuts = tuple(cut + 1 for cut in pipe.deployment.staged.cuts)
            weights = tuple(1.0 for _ in pipe.deployment.staged.weights)
            pipe.apply(Proposal(pipe.deployment.staged.cuts, cuts, weights, (2.0,), (1.0,)), optimizer)
            assert pipe.deployment.staged.cuts == cuts
    names = [name for name, _ in pipe.named_parameters()]
    assert len(names) == len(set(names))
    state = pipe.state_dict()
    assert set(state) <= set(net.state_dict(keep_vars=True))
    assert {value["calls"] for name, value in state.items() if name.endswith("_extra_state")} == {24}
    whole = pipe.full_state_dict()
    assert list(whole) == list(net.state_dict(keep_vars=True))
    pipe.load_state_dict(whole)
    pipe.fill_model()
    assert all(torch.equal(value, whole[name]) for name, value in net.named_parameters(remove_duplicate=False))
    pipe.close()
    return found


def make() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("schedule", mostly_slow(["1f1b", "zb-v"], "zb-v"))
def test_training_goes_on_as_if_nothing_had_happened_on_threads(schedule: str) -> None:
    plain = losses(make(), None, 4, schedule)
    moved = losses(make(), 3, 4, schedule)
    assert moved == pytest.approx(plain, rel=1e-6)
    assert plain[-1] < plain[0]


def with_and_without(ranks: int) -> tuple[list[float], list[float]]:
    return losses(make(), None, ranks), losses(make(), 3, ranks)


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_happened_on_processes() -> None:
    """Parameters change processes, and AdamW's moments with them."""
    for plain, moved in on_processes(2, with_and_without, 2):
        assert moved == pytest.approx(plain, rel=1e-6)


def moved_frozen() -> tuple[dict[str, bool], str]:
    """(which parameters are trained after a move, what is said of groups that only some ranks have)."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with penstock.Pipeline(net, balance=[1, 3], microbatches=2, loss_fn=F.mse_loss, timeout=20) as pipe:
        for name, parameter in pipe.named_parameters():
            parameter.requires_grad_(name not in ("1.weight", "3.bias"))
        x, proposal = torch.randn(4, 4), Proposal((1,), (2,), (1.0,) * 4, (1.0, 3.0), (2.0, 2.0))
        named = list(pipe.named_parameters())
        groups = [[p for n, p in named if n.endswith("weight")], [p for n, p in named if n.startswith("0.b")]]
        uneven = torch.optim.SGD([{"params": group} for group in groups if group], lr=0.1)
        try:
            pipe.apply(proposal, uneven)
            said = ""
        except UsageError as error:
            said = str(error)
        pipe.apply(proposal, torch.optim.SGD(pipe.parameters(), lr=0.1))
        pipe.step(x, target=x)
        return {name: parameter.grad is not None for name, parameter in pipe.named_parameters()}, said


def test_what_moves_stays_frozen_and_groups_that_differ_are_refused() -> None:
    (first, said), (second, also) = on_processes(2, moved_frozen)
    assert set(first) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [name for name, trained in {**first, **second}.items() if not trained] == ["1.weight", "3.bias"]
    assert said == also
    assert "optimizers with 2 groups on rank 0 and optimizers with 1 groups on rank 1" in said


def moved_with_two_optimizers() -> list[set[str]]:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with penstock.Pipeline(net, balance=[1, 3], microbatches=2, loss_fn=F.mse_loss, timeout=20) as pipe:
        optimizers = [
            kind([p for n, p in pipe.named_parameters() if n.endswith(end)], lr=0.1)
            for kind, end in ((torch.optim.AdamW, "weight"), (torch.optim.SGD, "bias"))
        ]
        pipe.apply(Proposal((1,), (2,), (1.0,) * 4, (1.0, 3.0), (2.0, 2.0)), optimizers)
        names = {id(parameter): name for name, parameter in pipe.named_parameters()}
        return [{names[id(p)] for group in each.param_groups for p in group["params"]} for each in optimizers]


def test_each_parameter_stays_with_its_optimizer_where_there_are_several() -> None:
    first, second = on_processes(2, moved_with_two_optimizers)
    assert first == [{"0.weight", "1.weight"}, {"0.bias", "1.bias"}]
    assert second == [{"2.weight", "3.weight"}, {"2.bias", "3.bias"}]


def test_a_slow_stage_is_proposed_to_shrink() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=F.mse_loss) as pipe:
        slow = simulate(pipe.schedule, Costs(forward=(3.0, 1.0), input=(3.0, 1.0), weight=(3.0, 1.0)))
        proposal = pipe.rebalance(slow)
        assert proposal.changes
        assert proposal.cuts == (2,)
        assert proposal.gain == pytest.approx(1.5)
        before = copy.deepcopy(model.state_dict())
        pipe.apply(proposal)
        assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
        assert [len(part.module) for part in pipe.deployment.staged.parts] == [2, 4]
        x = torch.randn(4, 8)
        assert pipe.step(x, target=x).loss.item() == pytest.approx(F.mse_loss(model(x), x).item())


def test_gradients_must_be_used_up_before_a_move() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(torch.randn(4, 8), target=torch.randn(4, 8))
        slow = simulate(pipe.schedule, Costs(forward=(5.0, 1.0)))
        with pytest.raises(UsageError, match="there are gradients"):
            pipe.apply(pipe.rebalance(slow))


def test_what_cannot_be_cut_anew_says_so() -> None:
    with penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss) as pipe:
        with pipe.record() as timeline:
            pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        with pytest.raises(UsageError, match="cannot be cut anew"):
            pipe.rebalance(timeline)


class Counted(nn.Module):
    """A layer that counts its microbatches, and refuses those that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        if self.training:
            self.seen += 1
        return torch.tanh(self.linear(x))


NEW_CUT = Proposal((2,), (3,), (1.0,) * 6, (2.0,), (1.0,))


def in_train_steps(pipe: penstock.Pipeline, data: Any, optimizer: torch.optim.Optimizer, found: list[float]) -> None:
    for number, result in enumerate(pipe.train_steps(data, optimizer, clip=5.0)):
        found.append(result.loss.item())
        if number == 2:  # step 3 has run here as well
            pipe.apply(NEW_CUT, optimizer)


def by_hand(pipe: penstock.Pipeline, data: Any, optimizer: torch.optim.Optimizer, found: list[float]) -> None:
    for number, (x, y) in enumerate(data):
        found.append(pipe.step(x, target=y).loss.item())
        pipe.clip_grad_norm_(5.0)
        optimizer.step()
        pipe.zero_grad()
        if number == 3:
            pipe.apply(NEW_CUT, optimizer)


def moved_between_steps(overlapped: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Five steps, a new cut after the fourth, whose gradients are clipped, and a step that fails in its second half."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Counted() for _ in range(6)))
    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(6)]
    data[3][1].mul_(50)
    data[5][0][2:] = torch.nan
    found: list[float] = []
    with penstock.Pipeline(net, balance=[2, 4], microbatches=2, loss_fn=F.mse_loss, timeout=30) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        with pytest.raises(PenstockError, match="not finite"):
            (in_train_steps if overlapped else by_hand)(pipe, data, optimizer, found)
        return found, list(pipe.full_state_dict().values())


def loops_with_a_move() -> list[tuple[list[float], list[torch.Tensor]]]:
    return [moved_between_steps(overlapped) for overlapped in (False, True)]


def test_a_new_cut_inside_of_train_steps_waits_for_the_steps_before_it_and_holds_for_those_after_it() -> None:
    """It moved weights whose update was still to be taken back, and a later step that failed undid the old stages."""
    for (losses, state), (found, state_found) in on_processes(2, loops_with_a_move):
        assert found == losses[: len(found)]
        assert all(torch.equal(one, other) for one, other in zip(state, state_found, strict=True))
