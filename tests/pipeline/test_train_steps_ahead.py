"""What happens while a rank is ahead of others in `train_steps`: updates before all reports, and what the body does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from kept_processes import KeptProcesses
from pipeline.loops import (
    LIMIT,
    OPTIMIZERS,
    QUIET,
    STEPS,
    WIDTH,
    batches,
    by_hand,
    differences,
    hold_back,
    overlapped,
    pipeline,
    state_of,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transports import ON_PROCESSES

import penstock
from penstock.errors import PenstockError
from penstock.runtime.engine.report import EndedStep
from penstock.runtime.optim.snapshot import UpdateSnapshot
from penstock.schedule import Action, Op


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    with KeptProcesses(2) as kept:
        yield kept


def ahead(transport: str) -> list[float]:
    with pipeline("zb-h2", transport=transport) as pipe:
        hold_back(pipe, transport)
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        return [round(result.loss.item(), 6) for result in pipe.train_steps(batches(QUIET), optimizer, clip=1e9)]


@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_a_rank_begins_the_next_step_while_another_is_in_the_last(ranks: KeptProcesses, transport: str) -> None:
    one, other = ranks.run(ahead, transport)
    assert len(one) == STEPS
    assert one == other


@contextmanager
def counted_snapshots() -> Iterator[dict[str, int]]:
    """How often a snapshot is taken, and put back."""
    counts = {"again": 0, "take": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            original = getattr(UpdateSnapshot, name)

            def counted(self: Any, name: str = name, original: Any = original) -> Any:
                counts[name] += 1
                return original(self)

            patch.setattr(UpdateSnapshot, name, counted)
        yield counts


def corrections() -> tuple[int, int]:
    """How often a snapshot was taken, and an update taken back, in a run in which clipping bites."""
    with counted_snapshots() as counts, pipeline("zb-v", transport="shared") as pipe:
        list(pipe.train_steps(batches([1.0, 1.0, 60.0, *[1.0] * 7]), OPTIMIZERS["sgd"](pipe.parameters()), clip=4.0))
    return counts["take"], counts["again"]


def test_a_wrong_update_is_taken_back_once_and_then_updates_wait(ranks: KeptProcesses) -> None:
    """Ten steps, clipped in the third. The first ends together; the updates of the second, of the third (wrong) and,
    after four that have waited, of two of the last three are made early: the last waits for the end of the loop. Rank 0
    may know that some of these are right.
    """
    (taken, back), others = ranks.run(corrections)
    assert taken <= 2 + 2
    assert back == 1
    assert others == (2 + 2, 1)


def ends_last() -> tuple[int, list[str]]:
    """Rank 0 ends each step when rank 1 has reported: how many snapshots a rank takes, and what differs."""
    store, ended, posted, made = dist.distributed_c10d._get_default_store(), [0], [0], []
    with pipeline("zb-h2", transport="shared") as pipe:
        made.append(by_hand(pipe, batches(QUIET), "adamw", 1e9, False))
    with pipeline("zb-h2", transport="shared") as pipe, pytest.MonkeyPatch.context() as patch:
        last, post = [action for action in pipe.program.rows[0] if action.op is Op.W][-1], EndedStep.post

        def posting(self: EndedStep) -> None:
            post(self)
            posted[0] += 1
            if pipe.rank == 1:
                store.set(f"reported {posted[0]}", "yes")

        def weights(action: Action, context: Any) -> None:
            if pipe.rank == 0 and action == last:
                if ended[0]:  # a pipeline's first step ends on all ranks together
                    store.wait([f"reported {ended[0]}"], timedelta(seconds=TIMEOUT))
                ended[0] += 1
            context.run(action)

        patch.setattr(EndedStep, "post", posting)
        pipe.register("W", weights)
        with counted_snapshots() as counts:
            made.append(overlapped(pipe, batches(QUIET), "adamw", 1e9, False))
    return counts["take"], differences(*made)


def test_the_rank_that_ends_last_knows_all_reports_and_takes_no_snapshot(ranks: KeptProcesses) -> None:
    assert ranks.run(ends_last) == [(0, []), (STEPS - 2, [])]


def between(folder: str) -> dict[str, Any]:
    """Evaluations and a checkpoint inside of the loop, while an update that was made early is wrong."""
    scales, seen = [1.0, 1.0, 1.0, 50.0, 1.0, 1.0], {}
    held_out = next(batches([1.0]))
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer, plain = OPTIMIZERS["adamw"](pipe.parameters()), {}
        for x, y in batches(scales):
            pipe.step(x, target=y)
            pipe.clip_grad_norm_(2.0)
            optimizer.step()
            optimizer.zero_grad()
            plain[pipe.deployment.counter.step] = pipe.evaluate(held_out[0], target=held_out[1]).loss.item()
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        for _ in pipe.train_steps(batches(scales), optimizer, clip=2.0):
            loss = pipe.evaluate(held_out[0], target=held_out[1]).loss.item()
            seen[pipe.deployment.counter.step] = loss
            if pipe.deployment.counter.step == 4:
                break
        penstock.Checkpointer(folder).save(4, pipe, optimizer)
        rest = list(batches(scales))[4:]
        results = list(pipe.train_steps(rest, optimizer, clip=2.0))
        seen[6] = pipe.evaluate(held_out[0], target=held_out[1]).loss.item()
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        penstock.Checkpointer(folder).load(pipe, optimizer)
        again = list(pipe.train_steps(rest, optimizer, clip=2.0))
    losses = [[result.loss.item() for result in each] for each in (results, again)]
    return {"plain": plain, "seen": seen, "resumed": losses[0] == losses[1] and len(losses[0]) == 2}


def test_an_evaluation_inside_of_the_loop_sees_the_right_weights_and_a_checkpoint_resumes_with_the_same_losses(
    ranks: KeptProcesses, tmp_path: Path
) -> None:
    for found in ranks.run(between, str(tmp_path)):
        assert found["seen"] == {step: found["plain"][step] for step in found["seen"]}
        assert {4, 6} <= found["seen"].keys()
        assert found["resumed"]


def leaving() -> list[float]:
    """Rank 1 leaves its loop by an error of its own while rank 0 stays in it; both go on together afterwards."""
    store = dist.distributed_c10d._get_default_store()
    with pipeline("zb-h2", transport="shared") as pipe:
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        try:
            for number, _ in enumerate(pipe.train_steps(batches([1.0, 1.0, 50.0, 1.0]), optimizer, clip=2.0)):
                if number == 1 and pipe.rank == 1:
                    raise ValueError("of the loop's body")
                if number == 1:
                    store.wait(["left the loop"], timedelta(seconds=TIMEOUT))
                    break
        except ValueError:
            store.set("left the loop", "yes")
        rest = pipe.train_steps(batches(QUIET), optimizer, clip=2.0)
        return [result.loss.item() for result in rest]


def going_on() -> list[float]:
    """The same steps in one go."""
    with pipeline("zb-h2", transport="shared") as pipe:
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        list(pipe.train_steps(batches([1.0, 1.0, 50.0]), optimizer, clip=2.0))
        return [result.loss.item() for result in pipe.train_steps(batches(QUIET), optimizer, clip=2.0)]


def test_a_rank_that_leaves_its_loop_waits_for_nobody_and_its_update_is_checked_later(ranks: KeptProcesses) -> None:
    """The step that was not collected is the one in which clipping bites: the next loop first makes that right."""
    for left, whole in zip(ranks.run(leaving), ranks.run(going_on), strict=True):
        assert left == whole
        assert len(left) == STEPS


class Tokens(nn.Module):
    """A layer of a model of rows of different lengths, which all of its stages are told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        return torch.tanh(self.linear(x * valid))


def rows(odd: int | None = None) -> list[dict[str, Tensor]]:
    """Batches that make 3 to 6 microbatches; the lengths of one of them may be others."""
    made, found = torch.Generator().manual_seed(8), []
    for number in range(6):
        lengths = torch.randint(1, 9, (8,), generator=made)
        x, target = (torch.randn(8, 8, WIDTH, generator=made) for _ in range(2))
        lengths = torch.full((8,), 8) if number == odd else lengths
        found.append({"x": x, "lengths": lengths, "target": target})
    return found


def by_length(data: list[dict[str, Tensor]], overlaps: bool) -> tuple[Any, list[str]]:
    torch.manual_seed(0)
    split = penstock.by_tokens(17, lengths="lengths", sequences={"x": 1, "target": 1})
    options = {"microbatches": 2, "loss_fn": F.mse_loss, "timeout": TIMEOUT, "transport": "shared"}
    with penstock.Pipeline(
        [Tokens(), Tokens()], batch_options=penstock.BatchOptions(split=split), schedule="zb-h1", **options
    ) as pipe:
        optimizer, losses, together, counts = OPTIMIZERS["adamw"](pipe.parameters()), [], [], []
        if overlaps:
            for number, result in enumerate(pipe.train_steps(data, optimizer, clip=LIMIT)):
                losses.append(result.loss.item())
                together.append(result.together)
                ahead = not result.together and number < len(data) - 1  # this rank has run the next step
                assert result.steps_done == number + 1 + ahead
                counts.append(len(result.losses))
        else:
            for batch in data:
                result = pipe.step(**batch)
                losses.append(result.loss.item())
                counts.append(len(result.losses))
                pipe.clip_grad_norm_(LIMIT)
                optimizer.step()
                optimizer.zero_grad()
        return (losses, counts, state_of(pipe, optimizer)), together


def ragged() -> tuple[bool, list[int], list[str], str]:
    """Batches of different numbers of microbatches; and one whose lengths differ between the ranks."""
    (losses, counts, state), _ = by_length(rows(), False)
    (own, own_counts, own_state), together = by_length(rows(), True)
    same = losses == own and counts == own_counts and all(map(torch.equal, state, own_state))
    try:
        by_length(rows(odd=2 if dist.get_rank() == 1 else None), True)
        said = "nothing"
    except PenstockError as error:
        said = str(error)
    return same, counts, together, said


def test_batches_that_are_split_by_their_lengths_overlap_with_the_results_of_the_loop_by_hand(
    ranks: KeptProcesses,
) -> None:
    for same, counts, together, said in ranks.run(ragged):
        assert same
        assert len(set(counts)) > 1
        assert together == ["the first step of a pipeline", *[""] * 5]
        assert "both ranks must run the same program" in said  # where one rank's lengths are others
