"""A rank holds what its schedule says and no more: an activation is freed at its last use, a sent output once it left.

The schedule's own peak counts a microbatch of a stage from its F to its B or W. What that weighs is measured on the
stage alone: its input and what autograd saves. The stages here are GELU networks: between I and W such a stage holds
the inputs of its products and the gradients of their outputs, which weigh what it held before. (A ReLU network, of
which autograd saves half as much, holds up to twice its forward's bytes between I and W, under any split backward.)
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exactness.live import Live, allowed, bytes_of
from processes import on_processes
from tiers import by_turns, mostly_slow, slow_if
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transports import ON_PROCESSES

import penstock
from penstock.schedule.builders import TRAINING

WIDTH, ROWS, MICROBATCHES, LAYERS = 16, 8, 8, 6


def stage() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers)


def measured(family: str, ranks: int, recompute: str = "never", transport: str | None = None) -> dict[str, Any]:
    """The peaks of this process's ranks in the second step, what the schedule allows, and what is left after it."""
    torch.manual_seed(0)
    stages = [stage() for _ in range(2 * ranks)]
    x, y = (torch.randn(MICROBATCHES * ROWS, WIDTH) for _ in range(2))
    last = len(stages) - 1

    def with_loss(value: Tensor) -> Tensor:
        return F.mse_loss(stages[last](value), y[:ROWS])

    sizes = [
        bytes_of(with_loss if number == last else each, [*each.parameters(), y], x[:ROWS])
        for number, each in enumerate(stages)
    ]
    pipe = penstock.Pipeline(
        stages,
        microbatches=MICROBATCHES,
        schedule=family,
        ranks=ranks,
        loss_fn=F.mse_loss,
        recompute=recompute,
        transport=transport,
    )
    with pipe:
        pipe.step(x, target=y)
        live = Live(pipe, (x, y)).watch()
        pipe.step(x, target=y)
        gc.collect()
        return {
            "peaks": {rank: ledger.peak for rank, ledger in live.ledgers.items()},
            "allowed": {rank: allowed(pipe.schedule, rank, sizes) for rank in live.ledgers},
            "left": {rank: ledger.alive() for rank, ledger in live.ledgers.items()},
            "history": {rank: [(str(a), size) for a, size in ledger.history] for rank, ledger in live.ledgers.items()},
        }


def ratios(found: dict[str, Any]) -> dict[int, float]:
    return {rank: peak / found["allowed"][rank] for rank, peak in found["peaks"].items()}


@pytest.mark.parametrize("family", by_turns(TRAINING, fast=["zb-v"]))
def test_a_rank_on_a_thread_holds_what_the_schedule_says(family: str) -> None:
    found = measured(family, ranks=4)
    assert max(ratios(found).values()) <= 1.05
    assert max(ratios(found).values()) > 0.9  # else the measure is blind
    assert max(found["left"].values()) <= MICROBATCHES * 8 + 64  # the losses


def process(families: list[str], transport: str) -> list[dict[str, Any]]:
    dist.barrier()
    return [measured(family, dist.get_world_size(), transport=transport) for family in families]


BY_TURNS = [["gpipe", "interleaved-1f1b", "zb-v"], ["1f1b", "zb-h1", "v-min"]]


@pytest.mark.parametrize(
    ("transport", "families"),
    [
        pytest.param(
            transport, families, id=f"{transport}-{'-'.join(families)}", marks=slow_if(row % len(BY_TURNS) == column)
        )
        for row, transport in enumerate(ON_PROCESSES)
        for column, families in enumerate(BY_TURNS)
    ],
)
def test_a_rank_on_a_process_holds_what_the_schedule_says(transport: str, families: list[str]) -> None:
    told = on_processes(2, process, families, transport)
    worst = {family: max(max(ratios(rank[number]).values()) for rank in told) for number, family in enumerate(families)}
    assert {family: ratio for family, ratio in worst.items() if ratio > 1.05} == {}
    for number, family in enumerate(families):
        for rank in told:
            assert max(rank[number]["left"].values()) <= 4096, family  # losses, and buffers that are used again


@pytest.mark.slow
def test_recompute_holds_inputs_and_one_microbatch() -> None:
    plain, less = measured("gpipe", ranks=2), measured("gpipe", ranks=2, recompute="always")
    boundary = ROWS * WIDTH * 4
    for rank, peak in less["peaks"].items():
        assert peak <= (2 * MICROBATCHES + 4) * boundary + 1024
        assert peak * 4 < plain["peaks"][rank]


def test_each_backward_gives_back_what_its_forward_took() -> None:
    found = measured("gpipe", ranks=2)["history"][0]
    after = dict(found)
    drain = [after[f"0B{number}"] for number in range(MICROBATCHES)]
    assert drain == sorted(drain, reverse=True)
    assert drain[-1] <= 1024


@pytest.mark.parametrize("family", mostly_slow(["1f1b", "zb-v"], "1f1b"))
def test_after_a_step_nothing_holds_the_users_batch_or_outputs(family: str) -> None:
    pipe = penstock.Pipeline([stage() for _ in range(4)], microbatches=4, schedule=family, loss_fn=F.mse_loss)
    for run in (pipe.step, pipe.evaluate):
        x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        result = run(x, target=y, outputs=True)
        watched = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, y, result.output)]
        del x, y, result
        gc.collect()
        assert [ref.expired() for ref in watched] == [True, True, True]
    pipe.close()
