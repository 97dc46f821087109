"""Steps of replicas: with evaluations between them, by a program of the user, in windows, cut by measured times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deadlines import TIMEOUT
from kept_processes import KeptProcesses
from parallel.cases import whole_of
from parallel.data_parallel.replicas import (
    KINDS,
    ROW_SHARES,
    WIDTH,
    M,
    batch,
    by_name,
    close,
    gradients,
    own,
    pipeline,
    plain,
    stages,
)
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import ParallelOptions
from penstock.schedule import Op, build, lower


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    """Replica 0 and 1 of rank 0, then of rank 1."""
    with KeptProcesses(4) as kept:
        yield kept


def evaluations() -> Any:
    """Of unequal size, and fewer rows than microbatches on one replica."""
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = batch()
    found = {}
    for kind in KINDS:
        with pipeline(
            mesh, parallel_options=ParallelOptions(replicate=kind, window=1 if kind == "fsdp" else None)
        ) as pipe:
            pipe.step(*own(mesh, x), target=own(mesh, y)[0])
            before = gradients(pipe)
            mine, target = own(mesh, x, y, rows=(7, 2))
            result = pipe.evaluate(mine, target=target)
            output = pipe.predict(mine)
            after = gradients(pipe)
            pipe.step(*own(mesh, x), target=own(mesh, y)[0])
            kept = all(torch.equal(before[name], after[name]) for name in before)
            found[kind] = (result.loss, output, kept, before, gradients(pipe))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_of_unequal_size_between_steps_lose_nothing(ranks: KeptProcesses, kind: str) -> None:
    told = ranks.found(evaluations)
    x, y = batch()
    out = x[:9]
    for module in stages():
        out = module(out)
    for rank in told:
        loss, _, kept, before, after = rank[kind]
        torch.testing.assert_close(loss, F.mse_loss(out, y[:9]).detach())
        assert kept
        assert all(torch.equal(value * 2, after[name]) for name, value in before.items())
    outputs = [rank[kind][1] for rank in told]  # of a V, the last stage is on the first rank
    torch.testing.assert_close(torch.cat(outputs[:2]), out.detach())
    assert outputs[2:] == [None, None]


def names_and_state() -> Any:
    """Saved and loaded under the model's own names, whole or sharded."""
    mesh = penstock.mesh(pp=2, dp=2)
    whole = {name: value + 1 for name, value in nn.ModuleList(stages()).state_dict().items()}
    found = {}
    for kind in KINDS:
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            names = sorted(pipe.state_dict())
            pipe.load_state_dict(whole)
            taken = all(torch.equal(whole_of(value), whole[name]) for name, value in pipe.state_dict().items())
            again = {name: whole_of(value) for name, value in pipe.state_dict().items()}
            local = sum(getattr(value, "_local_tensor", value).numel() for value in pipe.state_dict().values())
            found[kind] = (names, taken, set(again) == set(names), local)
    return found


def test_names_are_the_models_own_and_sharded_state_is_a_part_of_it(ranks: KeptProcesses) -> None:
    told = ranks.found(names_and_state)
    names = sorted(nn.ModuleList(stages()).state_dict())
    for kind, share in (("ddp", 1), ("fsdp", 2)):
        for rank in told:
            mine, taken, again, local = rank[kind]
            assert taken
            assert again
            assert local == 2 * (WIDTH * WIDTH + WIDTH) // share
            assert {name.split(".")[0] for name in mine} in ({"0", "3"}, {"1", "2"})
        assert sorted({name for rank in told for name in rank[kind][0]}) == names


def schedules_with_transfers() -> Any:
    """A program from a file has its transfers already, and no reductions."""
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    program = lower(build("zb-v", 2, M, 2))
    found = {}
    for kind in KINDS:
        with pipeline(
            mesh, schedule=program, microbatches=None, parallel_options=ParallelOptions(replicate=kind)
        ) as pipe:
            found[kind] = (pipe.step(x, target=y).loss, gradients(pipe))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_without_reductions_gets_them(ranks: KeptProcesses, kind: str) -> None:
    told = ranks.found(schedules_with_transfers)
    loss, wanted = plain(stages(), *batch(), F.mse_loss, ROW_SHARES)
    torch.testing.assert_close(told[0][kind][0], loss)
    close(by_name(told, lambda rank: rank[kind][1]), wanted)


def windows() -> Any:
    """How many stages of a rank are whole at each action, by what FSDP itself says."""
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    found = {}
    for window in (1, 2):
        with pipeline(
            mesh,
            stages(6),
            schedule=build("interleaved-1f1b", 2, M, 3),
            microbatches=None,
            parallel_options=ParallelOptions(replicate="fsdp", window=window),
        ) as pipe:
            (executor,) = pipe.deployment.ranks.executors.values()
            groups = [
                module._get_fsdp_state()._fsdp_param_groups[0] for module in pipe.deployment.ranks.modules().values()
            ]
            most, between = 0, 0

            def count(action: Any, context: Any, groups: Any = groups) -> None:
                nonlocal most
                context.run(action)
                most = max(most, sum(group.is_unsharded for group in groups))

            for op in (Op.F, Op.B):
                pipe.register(op, count)
            pipe.step(x, target=y)
            between = sum(group.is_unsharded for group in groups)
            actions = Counter(action.op.name for action in pipe.program.rank(executor.rank) if action is not None)
            pipe.evaluate(x, target=y)
            found[window] = (most, between, dict(actions), sum(group.is_unsharded for group in groups))
    return found


@pytest.mark.slow
def test_no_more_stages_are_whole_than_the_window_says_and_none_between_steps(ranks: KeptProcesses) -> None:
    for rank in ranks.found(windows):
        for window, (most, between, actions, after) in rank.items():
            assert (most, between, after) == (window, 0, 0)
            assert actions["UNSHARD"] == actions["RESHARD"] > 3  # freed and gathered again within the step
            assert actions["REDUCE_GRAD"] == 3


def frozen_at_first() -> Any:
    """Parameters that were frozen when the pipeline was made, and are trained from the second step on."""
    mesh = penstock.mesh(pp=2, dp=2)
    x, y = own(mesh, *batch())
    found = {}
    for kind in KINDS:
        modules = stages()
        for module in modules:
            module.linear.weight.requires_grad_(False)
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            kept = [name for name, value in gradients(pipe).items() if value is None]
            pipe.zero_grad()
            for parameter in pipe.parameters():
                parameter.requires_grad_(True)
            result = pipe.step(x, target=y)
            found[kind] = (kept, result.loss, gradients(pipe), pipe.grad_norm())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_frozen_at_first_is_reduced_once_when_it_is_trained_later(ranks: KeptProcesses, kind: str) -> None:
    told = ranks.found(frozen_at_first)
    loss, wanted = plain(stages(), *batch(), F.mse_loss, ROW_SHARES)
    norm = nn.utils.get_total_norm(list(wanted.values()))
    for rank in told:
        kept, found, _, total = rank[kind]
        assert len(kept) == 2
        assert all(name.endswith("weight") for name in kept)
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(total, norm)
    close(by_name(told, lambda rank: rank[kind][2]), wanted)


class Slow(nn.Module):
    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(WIDTH, WIDTH), slow

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004 if self.slow else 0)
        out: Tensor = self.linear(x)
        return out


class Uneven(nn.Module):
    """Each replica finds another part of it slow: the first one its beginning."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slow((number < 3) == (replica == 0)) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def measured() -> list[int]:
    """How many layers each stage has where times say so."""
    mesh = penstock.mesh(pp=2, dp=2)
    torch.manual_seed(0)
    x, y = batch()
    with penstock.Pipeline(
        Uneven(mesh.get_local_rank("dp")),
        stages=2,
        microbatches=2,
        balance="time",
        example=(x[:2],),
        loss_fn=F.mse_loss,
        mesh=mesh,
        timeout=TIMEOUT,
    ) as pipe:
        pipe.step(x, target=y)
        return [len(part.units) for part in pipe.deployment.staged.parts]


@pytest.mark.slow
def test_all_replicas_cut_by_the_times_of_the_first(ranks: KeptProcesses) -> None:
    cuts = ranks.found(measured)
    assert cuts == [cuts[0]] * 4
    assert cuts[0][0] < cuts[0][1]
