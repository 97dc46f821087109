"""Bugs that others shipped where a pipeline meets replicas and shards, each tried on four real processes.

One group runs all of them: two replicas of a pipeline of two ranks. The first replica has the true parameters, the
second has others, as it would with another seed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel.cases import whole_of
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import ParallelOptions
from penstock.schedule import Op

WIDTH, M, ROWS = 5, 4, 16
pytestmark = pytest.mark.slow


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Picky(Layer):
    """Uses its second layer only for some batches, so that replicas differ in which parameters get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.rare(x) if x.sum() > 1e3 else out


class Outside(nn.Module):
    """Parameters that the model's own code reads, outside of the layers that it is cut into; some of odd kinds."""

    def __init__(self, turning: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64)) if turning else None
        self.first, self.last, self.both = (nn.Parameter(torch.randn(4, WIDTH)) for _ in range(3))
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first.sum(0) + self.both.mean(0)
        for layer in self.layers:
            x = layer(x)
        x = x * self.last.sum(0) + self.both.mean(0) + self.nothing.sum()
        return x if self.turn is None else (x * self.turn).abs()


def trained(mesh: Any, kind: str) -> dict[str, Tensor]:
    """Three steps of SGD on what the two replicas share."""
    x, y = (value.chunk(2)[mesh.get_local_rank("dp")] for value in small())
    given = {
        "microbatches": M,
        "loss_fn": F.mse_loss,
        "mesh": mesh,
        "timeout": 20,
        "parallel_options": penstock.ParallelOptions(replicate=kind),
    }
    with penstock.Pipeline(Outside(kind == "ddp"), stages=2, example=(x[:2],), **given) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(3):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        pipe.evaluate(x, target=y)
        return {name: whole_of(value).clone() for name, value in pipe.state_dict().items()}


def small() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    return torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, WIDTH, generator=made)


def stages(count: int = 4, tied: bool = False, picky: bool = False) -> list[Any]:
    torch.manual_seed(0)
    made: list[Any] = [Picky() if picky else Layer() for _ in range(count)]
    if tied:
        made[-1].linear.weight = made[0].linear.weight
    return made


def batch() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH, generator=made), torch.randn(ROWS, WIDTH, generator=made)
    x[ROWS // 2 :] += 1e3  # the second replica's batch
    return x, y


def gradients(pipe: penstock.Pipeline) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole_of(p.grad).clone() for name, p in pipe.named_parameters()}


def run(mesh: Any, modules: list[Any], steps: int = 1, evaluate: bool = False, **options: Any) -> dict[str, Any]:
    x, y = (value.chunk(2)[mesh.get_local_rank("dp")] for value in batch())
    if mesh.get_local_rank("dp"):
        for module in modules:
            for parameter in module.parameters():
                nn.init.constant_(parameter, 0.3)
    given = {"microbatches": M, "loss_fn": F.mse_loss, "mesh": mesh, "timeout": 20, **options}
    with penstock.Pipeline(modules, **given) as pipe:
        for _ in range(steps):
            pipe.step(x, target=y)
            if evaluate:
                pipe.evaluate(x, target=y)
        return {
            "gradients": gradients(pipe),
            "reductions": [
                a.stage for a in pipe.program.rank(pipe.deployment.world.transport.rank) if a and a.op is Op.REDUCE_GRAD
            ],
        }


def everything() -> dict[str, Any]:
    mesh = penstock.mesh(pp=2, dp=2)
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp"):
        for family in ("zb-v", "interleaved-zb"):
            found[kind, family] = run(mesh, stages(), schedule=family, parallel_options=ParallelOptions(replicate=kind))
        found[kind, "tied"] = run(
            mesh, stages(tied=True), schedule="zb-v", parallel_options=ParallelOptions(replicate=kind)
        )
        found[kind, "looped"] = run(
            mesh, stages(tied=True), schedule="looped-bfs", parallel_options=ParallelOptions(replicate=kind)
        )
        found[kind, "evaluated"] = run(
            mesh, stages(), steps=2, evaluate=True, schedule="zb-v", parallel_options=ParallelOptions(replicate=kind)
        )
        found[kind, "picky"] = run(
            mesh, stages(picky=True), schedule="1f1b", parallel_options=ParallelOptions(replicate=kind)
        )
        found[kind, "outside"] = trained(mesh, kind)
    for family in ("dualpipe-v", "interleaved-1f1b"):
        stages_of = 8 if family == "interleaved-1f1b" else 4
        found["fsdp", family] = run(
            mesh, stages(stages_of), schedule=family, parallel_options=ParallelOptions(replicate="fsdp", window=1)
        )
    return found


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return on_processes(4, everything)


def plain(modules: list[Any], steps: int = 1) -> dict[str, Tensor | None]:
    x, y = batch()
    for _ in range(steps):
        for half in (0, 1):
            parts = zip(x.chunk(2)[half].chunk(M), y.chunk(2)[half].chunk(M), strict=True)
            for part, goal in parts:
                out = part
                for module in modules:
                    out = module(out)
                (F.mse_loss(out, goal) / (2 * M)).backward()
    return {name: parameter.grad for name, parameter in nn.ModuleList(modules).named_parameters()}


def check(told: list[dict[str, Any]], key: Any, wanted: dict[str, Tensor | None]) -> None:
    for rank in told:
        for name, value in rank[key]["gradients"].items():
            name = name if name in wanted else "0.linear.weight"  # a tied copy goes by the name of its own stage
            other = wanted[name]
            assert (value is None) == (other is None), (key, name)
            if value is not None:
                torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-5, msg=f"{key} {name}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("family", ["zb-v", "interleaved-zb"])
def test_zero_bubble_schedules_reduce(told: Any, kind: str, family: str) -> None:
    """torch's split backward writes `.grad` past every hook, so that DDP never reduced: replicas drifted apart by 8e-2
    in one step, without a word. Here the reduction is an action of the program, and asks no hook."""
    check(told, (kind, family), plain(stages()))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_parameter_tied_between_two_stages_of_one_rank_is_scaled_and_reduced_once(told: Any, kind: str) -> None:
    """Elsewhere each of its stages scaled it, and a group of ranks [0, 0] was made for it. zb-v has stages 0 and 3 on
    rank 0."""
    check(told, (kind, "tied"), plain(stages(tied=True)))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_last_backward_is_the_last_in_order_and_not_the_one_with_the_highest_number(told: Any, kind: str) -> None:
    """looped-bfs runs its backwards in reverse: reducing after microbatch M - 1 reduced one of four. Its stages 0 and 3
    are on different ranks, so a tied parameter is summed over them too."""
    check(told, (kind, "looped"), plain(stages(tied=True)))
    assert all(sorted(rank[kind, "looped"]["reductions"]) in ([0, 2], [1, 3]) for rank in told)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_evaluation_while_gradients_add_up_loses_none_and_nothing_is_reduced_twice(told: Any, kind: str) -> None:
    """torch's pipelining sets FSDP's gradients to None at each change of mode. And a step that reduced `.grad` itself
    would add the first step's sum once more for each replica."""
    check(told, (kind, "evaluated"), plain(stages(), steps=2))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_replicas_that_differ_in_which_parameters_were_used_neither_hang_nor_crash(told: Any, kind: str) -> None:
    """One all-reduce a parameter, in the order in which gradients come, crashes on a None or pairs different ones. Here
    the second replica alone uses `rare` in the first stage."""
    wanted = plain(stages(picky=True))
    assert wanted["0.rare.weight"] is not None
    assert wanted["1.rare.weight"] is None  # nothing that large comes out of a tanh
    check(told, (kind, "picky"), wanted)


@pytest.mark.parametrize("family", ["dualpipe-v", "interleaved-1f1b"])
def test_a_narrow_window_gathers_also_for_the_second_half_of_a_pair(told: Any, family: str) -> None:
    """A pass that opened only one kind of pair left 8 to 12 computes a rank on sharded parameters; and a window fixed
    at 3 never freed anything on ranks with fewer stages."""
    check(told, ("fsdp", family), plain(stages(8 if family == "interleaved-1f1b" else 4)))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_parameters_outside_of_layers_are_trained_where_they_are_sharded(told: Any, kind: str) -> None:
    """Ours: stages went on reading the whole parameter from before, which no optimizer had any more."""
    plain, (x, y) = Outside(kind == "ddp"), small()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
    seen = set()
    for rank in told:
        for name, value in rank[kind, "outside"].items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")
            seen.add(name)
    assert seen == set(plain.state_dict())
