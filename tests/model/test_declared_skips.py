"""Skips that layers declare: they travel straight to the stage that pops them, under every schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compat.torchgpipe.models import CHUNKS, batches, cells, in_chunks, unet
from processes import on_processes
from tiers import by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.compat.torchgpipe.skip import pop, skippable, stash
from penstock.errors import ModelError
from penstock.model.cut import cut_model
from penstock.model.declared_skips import waiting_skips

SCHEDULES = [
    ("gpipe", 4),
    ("1f1b", 8),
    ("looped-bfs", 8),
    ("interleaved-1f1b", 8),
    ("zb-h1", 4),
    ("interleaved-zb", 8),
    ("zb-v", 8),
    ("v-min", 8),
    ("dualpipe-v", 8),
]


def losses(model: nn.Module, pipe: penstock.Pipeline | None) -> list[float]:
    optimizer = torch.optim.SGD((model if pipe is None else pipe).parameters(), lr=0.1)
    found = []
    for x in batches(count=2):
        optimizer.zero_grad()
        if pipe is None:
            loss = F.mse_loss(in_chunks(model)(x), x)
            loss.backward()
        else:
            loss = pipe.step(x, target=x).loss
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("schedule", "stages", "recompute"),
    by_turns(SCHEDULES, ["never", "always"], fast=[("1f1b", 8, "never"), ("zb-v", 8, "never")]),
)
def test_a_u_net_trains_as_in_a_plain_loop(schedule: str, stages: int, recompute: str) -> None:
    model, plain = unet(), unet()
    ranks = {} if stages == 4 or schedule == "1f1b" else {"ranks": 4}
    pipe = penstock.Pipeline(
        model, stages=stages, microbatches=CHUNKS, schedule=schedule, loss_fn=F.mse_loss, recompute=recompute, **ranks
    )
    edges = {4: ((0, 2), (0, 3)), 8: ((0, 6), (1, 5), (2, 4))}[stages]
    assert pipe.deployment.staged.topology.skips == edges
    assert losses(model, pipe) == pytest.approx(losses(plain, None), rel=1e-12)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    pipe.close()


def train_on_processes() -> list[float]:
    model = cells()
    pipe = penstock.Pipeline(model, stages=2, microbatches=CHUNKS, loss_fn=F.mse_loss)
    return losses(model, pipe)


@pytest.mark.slow
def test_processes_pass_them_too() -> None:
    want = losses(cells(), None)
    for found in on_processes(2, train_on_processes):
        assert found == pytest.approx(want, rel=1e-12)


def test_no_stage_in_between_has_them() -> None:
    split = cut_model(unet(), 4, balance=[1, 1, 4, 2])
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    first = split.parts[0].run({}, (x,), {})
    assert set(first) == {1, 3}  # the output to the next stage, the skip to the stage that pops it
    assert isinstance(first[1], Tensor)
    second = split.parts[1].run({0: first[1]}, (), {})
    assert set(second) == {2}  # its own skip goes to the next stage, beside its output
    third = split.parts[2].run({1: second[2]}, (), {})
    output = split.parts[3].run({2: third[3], 0: first[3]}, (), {})[-1]
    torch.testing.assert_close(output, unet()(x))
    assert not waiting_skips()


@skippable(stash=["a"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        yield stash("a", x)
        return self.linear(x)


@skippable(pop=["a"])
class Pop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        a = yield pop("a")
        return self.linear(x) + a


def test_nested_sequentials_and_names_used_again_one_after_the_other() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(Stash(), nn.Tanh()), Pop(), nn.Sequential(Stash(), nn.Sequential(Pop())))
    plain, x = copy.deepcopy(model), torch.randn(6, 4)
    pipe = penstock.GPipe(model, balance=[1, 1, 1], chunks=3)
    pipe(x).sum().backward()
    plain(x).sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Stash(), nn.Tanh()], "no layer pops 'a'"),
        ([nn.Tanh(), Pop()], "a Pop on stage 1 pops 'a', which no layer before it stashes"),
        ([Stash(), Stash(), Pop()], "a Stash on stage 0 stashes 'a', which was stashed before"),
    ],
)
def test_pairs_that_do_not_match_are_refused_when_the_model_is_cut(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        cut_model(nn.Sequential(*layers), 2, balance=[len(layers) - 1, 1])


def test_measuring_layers_runs_them_several_times_and_leaves_nothing() -> None:
    model = nn.Sequential(Stash(), nn.Linear(4, 4), Pop(), nn.Linear(4, 4))
    assert len(cut_model(model, 2, balance="time", example=(torch.randn(2, 4),)).parts) == 2
    assert not waiting_skips()
