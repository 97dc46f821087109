"""How often a step makes the host wait for its device: not between its first action and its last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from tiers import by_turns, mostly_slow

LEARNING = 2  # steps that find out what a loss is a mean of, and make what later ones use
# By what is in the place of a wait: when it is. Nothing else may wait.
BEFORE, AFTER, BETWEEN = "_resolve", ("end_step", "fingerprint"), "changed_in_body"


def model_and_batch(kind: str) -> dict[str, Any]:
    """A model in two stages with its loss and a batch on the CPU."""
    import torch
    from torch import nn

    import penstock
    from penstock.tools.train.config.settings import GPTOptions
    from penstock.tools.train.models.gpt import build_gpt

    torch.manual_seed(0)
    if kind == "mlp":
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        return {
            "x": torch.randn(8, 8),
            "y": torch.randn(8, 8),
            "model": nn.Sequential(*layers),
            "loss_fn": nn.MSELoss(),
        }
    tokens = torch.randint(0, 32, (8, 13))
    return {
        "x": tokens[:, :-1].contiguous(),
        "y": tokens[:, 1:].contiguous(),
        "model": build_gpt(GPTOptions(vocabulary=32, layers=4, width=16, heads=2, dropout=0.1), 12),
        "loss_fn": lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
        "example": (tokens[:2, :-1],),
        "cut_options": penstock.CutOptions(method="replay"),
    }


def waits(kind: str, overlapped: bool, there: bool) -> list[list[str]]:
    """The places where the host waits in each step; `there`: the batch is on the devices already."""
    import torch
    import torch.distributed as dist
    from accelerator import pretend

    import penstock

    options = model_and_batch(kind)
    x, y = options.pop("x"), options.pop("y")
    if there:
        rank = dist.get_rank() if dist.is_initialized() else None
        x, y = x.to(pretend.device(rank or 0)), y.to(pretend.device(1 if rank is None else rank))
    pretend.clear()
    pretend.defer()  # to ask whether something has ended is no wait
    found: list[list[str]] = []
    with penstock.Pipeline(stages=2, microbatches=4, schedule="1f1b", seed=5, timeout=20, **options) as pipe:
        sgd, seen = torch.optim.SGD(pipe.parameters(), lr=0.1), 0
        for _ in steps(pipe, sgd, x, y, overlapped):
            found.append([each.place for each in pretend.syncs()[seen:]])
            seen = len(pretend.syncs())
    return found


def steps(pipe: Any, sgd: Any, x: Any, y: Any, overlapped: bool) -> Iterator[Any]:
    if overlapped:
        yield from pipe.train_steps([(x, y)] * 6, sgd)
        return
    for _ in range(5):
        yield pipe.step(x, target=y)
        sgd.step()
        sgd.zero_grad()


def all_waits(kind: str) -> dict[tuple[bool, bool], list[list[str]]]:
    ways = [(overlapped, there) for overlapped in (False, True) for there in (False, True)]
    return {(overlapped, there): waits(kind, overlapped, there) for overlapped, there in ways}


def kinds_of(places: list[str]) -> tuple[int, int, int, list[str]]:
    """How many waits are before the first action, after the last one and between steps, and which are anywhere else."""
    before = [each for each in places if BEFORE in each]
    after = [each for each in places if any(word in each for word in AFTER)]
    between = [each for each in places if BETWEEN in each]
    return len(before), len(after), len(between), [each for each in places if each not in before + after + between]


@pytest.mark.parametrize(
    ("kind", "processes"), by_turns(["mlp", "gpt"], [False, True], fast=[("mlp", False)], one_in=1)
)
def test_a_step_waits_for_no_device_between_its_actions_and_once_after_them(processes: bool, kind: str) -> None:
    """A GPT's loss is a mean over targets that count: where they are on a device, they are counted there beforehand."""
    outcomes = on_ranks(2, all_waits, kind) if processes else [on_device(all_waits, kind)]
    for rank, outcome in enumerate(outcomes):
        assert outcome.races == []
        for (overlapped, there), found in outcome.value.items():
            # The last result of a loop comes with what follows the loop.
            for places in found[LEARNING : -1 if overlapped else None]:
                before, after, between, elsewhere = kinds_of(places)
                assert elsewhere == []
                assert before <= (kind == "gpt" and there and rank == len(outcomes) - 1)
                assert after <= 1
                assert between <= (overlapped and processes)


def waits_of_clipping() -> list[str]:
    import penstock

    options = model_and_batch("mlp")
    x, y = options.pop("x"), options.pop("y")
    with penstock.Pipeline(stages=2, microbatches=4, seed=5, timeout=20, **options) as pipe:
        from accelerator import pretend

        for _ in range(2):
            pipe.step(x, target=y)
            before = len(pretend.syncs())
            pipe.clip_grad_norm_(0.1)
        return [each.text for each in pretend.syncs()[before:]]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_clipping_waits_for_the_norm_alone(name: str) -> None:
    """The norm went back to each device by a copy that the host waited for."""
    assert on_device(waits_of_clipping, name=name).value == ["item()"]
    assert [each.value for each in on_ranks(2, waits_of_clipping, name=name)] == [["item()"]] * 2
