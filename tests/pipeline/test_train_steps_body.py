"""What the body of a loop of `train_steps` sees and may change, while others are not done with the step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kept_processes import KeptProcesses
from pipeline.loops import (
    LIMIT,
    QUIET,
    STEPS,
    batches,
    differences,
    pipeline,
    state_of,
)
from tiers import mostly_slow
from torch import nn

from penstock.errors import PenstockError


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    with KeptProcesses(2) as kept:
        yield kept


def with_a_body(clip: float) -> tuple[list[str], int]:
    """The body of either loop sets the learning rate, and keeps a mean of the weights that it sees."""
    scales, made, bodies = [1.0, 1.0, 1.0, 40.0, 1.0, 1.0, 30.0], [], 0

    def body(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (2 + number)
        mean.update_parameters(own)

    for is_by_hand in (False, True):
        with pipeline("1f1b", transport="shared") as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
            own = nn.ParameterList(pipe.parameters())
            mean = torch.optim.swa_utils.AveragedModel(own, avg_fn=lambda mean, value, _: 0.5 * mean + 0.5 * value)
            if is_by_hand:
                for number, (x, y) in enumerate(batches(scales)):
                    pipe.step(x, target=y)
                    pipe.clip_grad_norm_(clip)
                    optimizer.step()
                    pipe.zero_grad()
                    body(number)
            else:
                for number, result in enumerate(pipe.train_steps(batches(scales), optimizer, clip=clip)):
                    bodies += not result.together
                    body(number)
            made.append([*state_of(pipe, optimizer), *mean.parameters()])
    same = {"losses": [], "norms": [], "updated": []}
    return differences(same | {"state": made[0]}, same | {"state": made[1]}), bodies


@pytest.mark.parametrize("clip", mostly_slow([LIMIT, 2.0, 1e9], LIMIT))
def test_the_body_sees_the_weights_and_sets_the_learning_rate_as_in_the_plain_loop(
    ranks: KeptProcesses, clip: float
) -> None:
    """It saw an update that was taken back later: an average of weights was off by 0.001 to 0.008 in silence. And a
    rate that it set was for the update after the next.
    """
    for apart, bodies in ranks.run(with_a_body, clip):
        assert apart == []
        assert clip != 1e9 or bodies == 6  # all but the first overlap


def with_hook() -> list[str]:
    """An optimizer whose hook may do anything: why its steps ended together."""
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: None)
        return [result.together for result in pipe.train_steps(batches(QUIET), optimizer, clip=LIMIT)]


def test_updates_that_no_snapshot_has_all_of_end_together(ranks: KeptProcesses) -> None:
    why = "hooks of the optimizer, or objects that it holds"
    assert ranks.run(with_hook) == [["the first step of a pipeline", *[why] * (STEPS - 1)]] * 2


CHANGES = "in place", "by its data", "its gradient", "on rank 1", "after settle()"


def changing_weights(way: str) -> str:
    """The loop's body writes to parameters, and the fourth step is clipped."""
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        try:
            for _ in pipe.train_steps(batches([1.0, 1.0, 1.0, 40.0, 1.0, 1.0]), optimizer, clip=LIMIT):
                if way == "after settle()":
                    pipe.settle()
                for parameter in [] if way == "on rank 1" and pipe.rank == 0 else pipe.parameters():
                    if way == "its gradient":
                        parameter.grad = torch.full_like(parameter, 1e-6)
                    elif way == "by its data":
                        parameter.data.neg_()  # of the same norm
                    else:
                        with torch.no_grad():
                            parameter.mul_(0.9)
        except PenstockError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("way", mostly_slow(CHANGES, "by its data", "on rank 1", "after settle()"))
def test_weights_that_the_body_changes_before_all_ranks_are_done_are_refused(ranks: KeptProcesses, way: str) -> None:
    """What the body had done was undone with the update. After settle() no update can be taken back any more.

    Where one rank has done so, the others waited for it, and were not told why it had left.
    """
    for number, said in enumerate(ranks.run(changing_weights, way)):
        if way == "after settle()":
            assert said == "nothing"
        elif way == "on rank 1" and number == 0:
            assert said.startswith("rank 1 failed: UsageError: parameter 1.linear.weight (or its gradient) was changed")
        else:
            assert f"parameter {number}.linear.weight (or its gradient) was changed in the body" in said
            assert "call pipe.settle() before" in said
