"""What comes and goes in memory is counted, block by block, so that no peak is missed."""

from __future__ import annotations

import torch

import penstock
from penstock.schedule import Action
from penstock.tools.train.run.allocations import STAYS, Allocations, Arrivals, counted_step, most_at_once

BYTES = 4 * 1000


def test_every_block_is_seen_however_short_it_lives() -> None:
    with Allocations() as memory:
        kept = torch.empty(1000)
        for _ in range(50):
            torch.empty(3000)  # gone before any clock could look
        after = torch.empty(2000)
        del after
    assert memory.changes[0].nbytes == BYTES
    passing = [block for block in memory.blocks() if block[1] < STAYS]
    assert sorted(size for _, _, size in passing) == [2 * BYTES, *[3 * BYTES] * 50]  # what stays is left out
    assert (most_at_once(passing), most_at_once(memory.blocks())) == (3 * BYTES, 4 * BYTES)
    assert memory.within(memory.changes[0].when, memory.changes[-1].when + 1) == (BYTES, 4 * BYTES)
    assert kept.numel() == 1000


def test_garbage_from_before_that_is_collected_meanwhile_is_no_business_of_the_pass() -> None:
    """A dry run in a process with a past predicted less for a plain pass than for one that recomputes."""
    garbage = [torch.empty(5000)]
    with Allocations() as memory:
        kept = torch.empty(1000)
        garbage.clear()
    assert [change.nbytes for change in memory.changes] == [BYTES]
    assert kept.numel() == 1000


def test_most_at_once_of_blocks_that_overlap() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, 10, 5), (2, 4, 7), (4, 6, 6)]) == 12  # the second goes when the third comes


def test_a_pass_says_when_its_computes_ran_and_what_had_arrived_for_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    with penstock.Pipeline(model, stages=2, ranks=1, microbatches=2, loss_fn=torch.nn.MSELoss()) as pipe:
        with Arrivals(pipe) as arrivals, Allocations() as memory:
            pipe.step(torch.randn(6, 8), target=torch.randn(6, 4))
        assert {str(action) for action in memory.actions} == {
            f"{s}{op}{m}" for s in (0, 1) for op in "FB" for m in (0, 1)
        }
        message = 3 * 16 * 4  # rows, width, bytes: the activation goes on, its gradient comes back
        assert arrivals.sizes[Action.parse("1F0"), 0] == arrivals.sizes[Action.parse("0B1"), 1] == message
        assert list(arrivals.spans(memory.actions)) == []  # both stages are on this rank: torch has allocated it
        only_last = {action: times for action, times in memory.actions.items() if action.stage == 1}
        begin, end = only_last[Action.parse("1F0")][0], only_last[Action.parse("1B0")][1]
        assert (begin, end, message) in list(arrivals.spans(only_last))  # kept until the backward has ended
        assert not pipe.deployment.ranks.executors[0].handlers


def test_gradients_that_a_step_makes_are_counted_with_what_there_is_at_that_time() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1, bias=False))
    with penstock.Pipeline(model, stages=1, ranks=1, microbatches=2, loss_fn=torch.nn.MSELoss()) as pipe:
        x, y = torch.randn(2, 1000), torch.randn(2, 1)
        pipe.step(x, target=y)
        with counted_step(pipe) as adding:
            pipe.step(x, target=y)
        pipe.zero_grad()
        with counted_step(pipe) as making:
            pipe.step(x, target=y)
        assert making.with_gradients == adding.with_gradients  # which keeps a copy of those that were there before
        assert adding.activations == making.activations + BYTES
