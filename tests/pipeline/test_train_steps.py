"""`train_steps` has the results of the loop that ends every step on all ranks together, to the last bit.

The loop that it is compared with is written out in `loops.by_hand`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from kept_processes import KeptProcesses
from pipeline.loops import (
    BITES,
    OPTIMIZERS,
    QUIET,
    SPOILED,
    WIDTH,
    batches,
    by_hand,
    differences,
    overlapped,
    pipeline,
    state_of,
)
from processes import on_processes
from tiers import mostly_slow
from torch import Tensor, nn
from torch.nn import functional as F
from transports import ON_PROCESSES

import penstock
from penstock.errors import UsageError
from penstock.schedule.builders import TRAINING

CASES = [
    *[(family, "adamw", None, False, QUIET) for family in TRAINING],
    ("zb-v", "sgd", 2.0, False, BITES),
    ("steady", "adamw", 2.0, False, BITES),
    ("1f1b", "adamw", 2.0, False, BITES),
    ("zb-h2", "sgd", 1e9, False, QUIET),
    ("zb-h1", "adamw", 1e-3, False, QUIET),
    ("zb-v", "adamw", 5.0, True, SPOILED),
    ("1f1b", "sgd", None, True, SPOILED),
]
FAST = [case for case in CASES if case[0] in ("zb-v", "steady")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    with KeptProcesses(2) as kept:
        yield kept


def compared(transport: str, cases: list[Any], ranks: int) -> dict[str, list[str]]:
    found = {}
    for family, name, clip, skip, scales in cases:
        pair = []
        for way in (by_hand, overlapped):
            with pipeline(family, ranks, transport, dtype=torch.float64) as pipe:
                pair.append(way(pipe, batches(scales, torch.float64), name, clip, skip))
        found[f"{family} {name} {clip} {skip}"] = differences(*pair)
    return found


def test_a_v_schedule_trains_as_the_loop_by_hand_on_processes(ranks: KeptProcesses) -> None:
    for found in ranks.run(compared, "shared", FAST, 2):
        assert not {case: apart for case, apart in found.items() if apart}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_every_family_trains_as_the_loop_by_hand_on_processes(transport):
    """On the transports by turns; the exhaustive tests have each on both."""
    cases = CASES[ON_PROCESSES.index(transport) :: len(ON_PROCESSES)]
    for found in on_processes(2, compared, transport, cases, 2):
        assert not {case: apart for case, apart in found.items() if apart}


EVERYTHING = [
    (family, name, clip, skip, scales)
    for family in TRAINING
    for name in OPTIMIZERS
    for clip, skip, scales in ((None, False, QUIET), (2.0, False, BITES), (5.0, True, SPOILED))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ON_PROCESSES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_family_optimizer_and_rule_on_processes(transport, ranks):
    for found in on_processes(ranks, compared, transport, EVERYTHING, ranks):
        assert not {case: apart for case, apart in found.items() if apart}


ON_THREADS = CASES[-7:]


@pytest.mark.parametrize(
    ("family", "name", "clip", "skip", "scales"), mostly_slow(ON_THREADS, ON_THREADS[0], ON_THREADS[1], ON_THREADS[-1])
)
def test_ranks_that_are_threads_train_as_the_loop_by_hand(family, name, clip, skip, scales):
    pair = []
    for way in (by_hand, overlapped):
        with pipeline(family, dtype=torch.float64) as pipe:
            pair.append(way(pipe, batches(scales, torch.float64), name, clip, skip))
    assert not differences(*pair)


def train_tied() -> list[str]:
    """A weight that two ranks share: its gradients meet when a step ends, so steps end together."""
    made = []
    for way in (by_hand, overlapped):
        torch.manual_seed(0)
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        stages = {"microbatches": 4, "loss_fn": F.mse_loss, "seed": 3, "timeout": TIMEOUT, "transport": "shared"}
        with penstock.Pipeline([first, second], **stages) as pipe:
            made.append(way(pipe, batches(BITES), "adamw", 1.0, False))
    return differences(*made)


def test_tied_weights_across_ranks_train_as_the_loop_by_hand(ranks: KeptProcesses) -> None:
    assert ranks.run(train_tied) == [[], []]


def with_a_rank_without_parameters() -> list[str]:
    made = []
    for by_train_steps in (False, True):
        torch.manual_seed(0)
        options = {"microbatches": 4, "loss_fn": F.mse_loss, "timeout": TIMEOUT, "transport": "shared"}
        with penstock.Pipeline([nn.Linear(WIDTH, WIDTH), nn.Tanh()], schedule="zb-h1", **options) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameter_groups({"*.bias": {"weight_decay": 0.0}}), lr=0.01)
            losses = []
            for x, y in [] if by_train_steps else batches(BITES):
                losses.append(pipe.step(x, target=y).loss.item())
                pipe.clip_grad_norm_(2.0)
                optimizer.step()
                pipe.zero_grad()
            if by_train_steps:
                losses = [each.loss.item() for each in pipe.train_steps(batches(BITES), optimizer, clip=2.0)]
            made.append({"losses": losses, "norms": [], "updated": [], "state": state_of(pipe, optimizer)})
    return differences(*made)


def test_a_rank_without_parameters_takes_part_with_groups_by_name(ranks: KeptProcesses) -> None:
    """Its optimizer, which has no parameter at all, was refused."""
    assert ranks.run(with_a_rank_without_parameters) == [[], []]


# -- what is refused, and what a batch may be


class Scaled(nn.Linear):
    def forward(self, input: Tensor, factor: Tensor) -> Tensor:
        return super().forward(input) * factor


def weighed(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return (weight * (output - target) ** 2).mean()


def test_a_batch_may_be_a_dict_of_what_step_takes():
    """The inputs of the model, the target, and what else the loss function takes, by name."""
    losses = []
    for by_train_steps in (False, True):
        torch.manual_seed(0)
        pipe = penstock.Pipeline([Scaled(WIDTH, WIDTH)], microbatches=2, loss_fn=weighed)
        batch = {"input": torch.randn(8, WIDTH), "factor": torch.rand(8, 1), "target": torch.randn(8, WIDTH)}
        batch["loss_kwargs"] = {"weight": torch.rand(8, WIDTH)}
        if by_train_steps:
            (result,) = pipe.train_steps([batch], torch.optim.SGD(pipe.parameters(), lr=0.1))
            assert result.together == "ranks are threads"
        else:
            result = pipe.step(**batch)
        losses.append(result.loss)
    assert torch.equal(*losses)


def test_loops_do_not_nest_and_arguments_are_checked_before_the_first_step():
    with pipeline("1f1b") as pipe:
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        loop = pipe.train_steps(batches(QUIET), optimizer)
        next(loop)
        with pytest.raises(UsageError, match="do not nest"):
            pipe.train_steps(batches(QUIET), optimizer)
        loop.close()
        with pytest.raises(UsageError, match="clip=-1"):
            pipe.train_steps(batches(QUIET), optimizer, clip=-1)
        with pytest.raises(UsageError, match="optimizer="):
            pipe.train_steps(batches(QUIET), pipe)
        with pytest.raises(UsageError, match="scheduler="):
            pipe.train_steps(batches(QUIET), optimizer, scheduler=0.9)


def test_a_loss_scaler_leaves_out_what_overflows_and_says_so():
    """In threads: the scale begins too high by far, and is lowered after the first step."""
    made = []
    for by_train_steps in (False, True):
        with pipeline("1f1b") as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            scaler = penstock.GradScaler(pipe, init_scale=2.0**126, backoff_factor=2.0**-20, growth_interval=2)
            if by_train_steps:
                updated = [each.updated for each in pipe.train_steps(batches([1e3] * 8), optimizer, clip=1.0)]
            else:
                for x, y in batches([1e3] * 8):
                    pipe.step(x, target=y)
                    scaler.unscale_(optimizer)
                    pipe.clip_grad_norm_(1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    pipe.zero_grad()
            made.append((scaler.get_scale(), state_of(pipe, optimizer)))
    assert made[0][0] == made[1][0]
    assert all(map(torch.equal, made[0][1], made[1][1]))
    assert not updated[0]
    assert updated[-1]


# -- where steps end together all the same: the results are those of the loop by hand


def local(value: Tensor) -> Tensor:
    """A sharded tensor as this process holds it."""
    return getattr(value, "_local_tensor", value)


def kind_of(kind: str, by_train_steps: bool) -> dict[str, Any]:
    """Six steps with clipping that bites and an overflow that is left out."""
    options: dict[str, Any] = {"dtype": torch.float64}
    schedule, size = "zb-h1", dist.get_world_size()
    if kind in ("ddp", "fsdp"):
        options |= {"mesh": penstock.mesh(pp=size // 2, dp=2)}
        options |= {"parallel_options": penstock.ParallelOptions(replicate=kind)}
        size //= 2
    data = list(batches([1.0, 1.0, 40.0, math.inf, 30.0, 1.0], torch.float64))
    if kind in ("ddp", "fsdp"):
        mine = options["mesh"].get_local_rank("dp")
        data = [(x[mine : mine + 8], y[mine : mine + 8]) for x, y in data]  # of other rows on each replica
    transport = "distributed" if dist.get_world_size() == 1 else None
    pipe = pipeline(schedule, size, transport, **options)
    with pipe, pipe.record() if kind == "record" else nullcontext():
        if by_train_steps:
            optimizer = OPTIMIZERS["adamw"](pipe.parameters())
            rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            results = list(pipe.train_steps(data, optimizer, clip=2.0, scheduler=rate, skip_nonfinite=True))
            found: dict[str, Any] = {
                "losses": [each.loss.item() for each in results],
                "norms": [each.norm.item() for each in results],
                "updated": [each.updated for each in results],
                "state": state_of(pipe, optimizer),
                "together": [each.together for each in results],
            }
        else:
            found = by_hand(pipe, data, "adamw", 2.0, True)
    found["state"] = [local(value) for value in found["state"]]
    return found


def kinds(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        one, other = (kind_of(name, by_train_steps) for by_train_steps in (False, True))
        found[name] = differences(one, other), other["together"], other["updated"]
    return found


def check_kinds(ranks: int, expected: dict[str, str]) -> None:
    for found in on_processes(ranks, kinds, list(expected)):
        for name, why in expected.items():
            apart, together, updated = found[name]
            assert not apart, name
            assert set(together[1:]) == ({why} if why else {"", "clipping, or a skip, of late"}), name
            assert updated == [True, True, True, False, True, True]


def test_one_process_trains_as_the_loop_by_hand():
    """A pipeline of one rank has nobody to wait for; its updates are made early, and taken back, all the same."""
    for found in on_processes(1, kinds, ["plain", "record"]):
        for name, (apart, together, updated) in found.items():
            assert not apart, name
            assert set(together[1:]) <= {"", "clipping, or a skip, of late"} or name == "record"
            assert updated == [True, True, True, False, True, True]


@pytest.mark.slow
def test_replicas_shards_and_recorded_steps_train_as_the_loop_by_hand():
    check_kinds(2, {"ddp": "", "fsdp": "sharded or spread parameters", "record": "record()"})
    check_kinds(4, {"ddp": ""})
