"""A rank that fails in `train_steps` while others may be ahead: named with its step, and undone or refused on all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from kept_processes import KeptProcesses
from pipeline.loops import LIMIT, OPTIMIZERS, QUIET, STEPS, WIDTH, batches, by_hand, differences, pipeline, state_of
from tiers import by_turns
from transports import ON_PROCESSES

from penstock.errors import PenstockError
from penstock.schedule import Action, Op


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    with KeptProcesses(2) as kept:
        yield kept


def failing(action_of: str, number: int, clip: float | None = None) -> tuple[list[str], list[str], str]:
    """Rank 1 fails in the step of that number, counted from 0: what is raised, its notes, and whether one can go on."""
    store, key = dist.distributed_c10d._get_default_store(), f"ahead of {action_of} {number} {clip}"
    with pipeline("zb-h2", transport="shared") as pipe:
        row = [action for action in pipe.program.rows[1] if str(action.op.name) == action_of[0]]
        where, calls, began = row[int(action_of[1:])], [0], [0]

        def forward(action: Action, context: Any) -> None:
            began[0] += pipe.rank == 0 and action.microbatch == 0
            if began[0] == number + 2:
                store.set(key, "yes")
            context.run(action)

        def breaks(action: Action, context: Any) -> None:
            if pipe.rank == 1 and action == where:
                calls[0] += 1
                if calls[0] == number + 1:
                    if action.op is Op.W:  # which no other rank waits for: they are to be in the next step by then
                        store.wait([key], timedelta(seconds=TIMEOUT))
                    raise ValueError("broken on purpose")
            context.run(action)

        pipe.register("F", forward)
        pipe.register(action_of[0], breaks)
        optimizer, results = OPTIMIZERS["sgd"](pipe.parameters()), []
        try:
            for result in pipe.train_steps(batches([1.0] * 6), optimizer, clip=clip):
                results.append(result.loss.item())
        except PenstockError as error:
            said, notes = str(error), list(error.__notes__)
        try:
            after = f"went on: {pipe.step(*next(batches([1.0]))[:1], target=next(batches([1.0]))[1]).loss is not None}"
        except PenstockError as error:
            after = str(error)
        return [said, f"{len(results)} results"], notes, after


def test_a_failure_that_others_are_ahead_of_names_its_step_and_refuses_to_go_on(ranks: KeptProcesses) -> None:
    """Without clipping there is no copy of the weights, by which those that are ahead could take their update back."""
    for (said, _), notes, after in ranks.run(failing, "W-1", 2):
        assert "rank 1" in said
        assert "broken on purpose" in said
        assert any("in step 2 of train_steps()" in note and "load a checkpoint" in note for note in notes)
        assert "not completed, or not updated, on every rank, so that the ranks no longer belong together" in after


@pytest.mark.parametrize(
    ("where", "number", "clip", "results", "note"),
    [
        ("W-1", 2, 1e9, 2, "in step 2 of train_steps()"),  # which others are ahead of
        ("F0", 2, None, 2, "in step 2 of train_steps()"),  # which reaches every rank
        ("F0", 4, 1e-3, 3, "in step 3 of train_steps(), counted from 0"),  # the second is clipped, the third runs twice
        ("F0", 5, None, 5, ""),  # the last, which is raised at the end of the loop
    ],
    ids=["others are ahead", "early", "while updates wait", "the last"],
)
def test_a_failure_is_undone_on_every_rank_and_training_can_go_on(
    ranks: KeptProcesses, where: str, number: int, clip: float | None, results: int, note: str
) -> None:
    for (said, found), notes, after in ranks.run(failing, where, number, clip):
        assert "broken on purpose" in said
        assert any(note in each and "undone on every rank" in each for each in notes)
        assert found == f"{results} results"
        assert after == "went on: True"


def repaired() -> list[str]:
    """Rank 1 fails once, in a part of the third step that rank 0 is ahead of; then the loop goes on from that batch."""
    scales, made = [1.0, 1.0, 1.0, 40.0, 1.0, 1.0], []
    with pipeline("zb-h2", transport="shared") as pipe:
        made.append(by_hand(pipe, batches(scales), "adamw", LIMIT, False))
    with pipeline("zb-h2", transport="shared") as pipe:
        last, calls = [action for action in pipe.program.rows[1] if action.op is Op.W][-1], [0]

        def breaks(action: Action, context: Any) -> None:
            calls[0] += pipe.rank == 1 and action == last
            if pipe.rank == 1 and action == last and calls[0] == 3:
                raise ValueError("broken on purpose")
            context.run(action)

        pipe.register("W", breaks)
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data, losses, norms, said = list(batches(scales)), [], [], []
        while len(losses) < len(data):
            try:
                for result in pipe.train_steps(data[len(losses) :], optimizer, clip=LIMIT, scheduler=rate):
                    losses.append(result.loss.item())
                    norms.append(result.norm.item())
            except PenstockError as error:
                said.append(str(error))
        made.append({"losses": losses, "norms": norms, "updated": [True] * 6, "state": state_of(pipe, optimizer)})
    assert len(said) == 1
    assert "broken on purpose" in said[0]
    return differences(*made)


def test_a_loop_that_goes_on_after_a_failure_has_the_results_of_one_that_had_none(ranks: KeptProcesses) -> None:
    """To the last bit, buffers and optimizer state included."""
    assert ranks.run(repaired) == [[], []]


CALLS: Counter[int] = Counter()  # of step(), by the id of the optimizer: in an attribute they would be taken back


class Breaking(torch.optim.SGD):
    """Fails in one of the calls of its step, counted from 0."""

    breaks_in = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        CALLS[id(self)] = 0

    def step(self, closure: Any = None) -> Any:
        CALLS[id(self)] += 1
        if CALLS[id(self)] - 1 == self.breaks_in:
            raise ValueError("an optimizer that breaks")
        return super().step(closure)


def failing_update(
    transport: str, number: int, clip: float | None = None, scales: list[float] = QUIET, wrong: int = 0
) -> list[str]:
    """The optimizer of rank 1 fails in the update after that step, before which so many were wrong and made again: what
    is raised, with its cause and its notes.
    """
    with pipeline("zb-v", transport=transport) as pipe:
        optimizer = Breaking(pipe.parameters(), lr=0.01)
        optimizer.breaks_in = number + wrong if pipe.rank == 1 else -1
        try:
            for _ in pipe.train_steps(batches(scales), optimizer, clip=clip):
                pass
        except (PenstockError, ValueError) as error:
            said = [type(error).__name__, str(error), repr(error.__cause__), *error.__notes__]
        try:
            pipe.step(torch.ones(8, WIDTH), target=torch.ones(8, WIDTH))
        except PenstockError as error:
            return [*said, str(error)]
        return [*said, "went on"]


FAILING_UPDATES: dict[str, Any] = {
    "the first": (0, None),
    "early": (2, None),
    "early, with a snapshot": (2, 1e9),
    "the last": (STEPS - 1, None),
    "made again": (2, LIMIT, [1.0, 1.0, 60.0, 1.0, 1.0], 1),
    "waited for": (3, LIMIT, [1.0, 1.0, 60.0, 1.0, 1.0], 1),
}


@pytest.mark.parametrize(
    ("case", "transport"),
    by_turns(
        FAILING_UPDATES,
        ON_PROCESSES,
        fast=[("early", "shared"), ("made again", "distributed"), ("waited for", "shared")],
    ),
)
def test_an_optimizer_that_fails_on_one_rank_is_named_by_all_with_its_error_and_step(
    ranks: KeptProcesses, case: str, transport: str
) -> None:
    """The others were not told, and took the rank for one that had left, or that was in another call."""
    where = f"in the update after step {FAILING_UPDATES[case][0]} of train_steps(), counted from 0"
    found = ranks.run(failing_update, transport, *FAILING_UPDATES[case])
    for rank, (kind, text, cause, *notes, after) in enumerate(found):
        assert "an optimizer that breaks" in text
        assert where in "".join(notes)
        assert "load a checkpoint on every rank" in "".join(notes)
        assert "not completed, or not updated, on every rank, so that the ranks no longer belong together" in after
        if rank == 1:
            assert kind == "ValueError" or cause == "ValueError('an optimizer that breaks')"
        else:
            assert kind == "PeerFailure"
            assert text.startswith(f"rank 1 failed (action update after step {FAILING_UPDATES[case][0]}): ValueError")


def failed_and_taken_back() -> list[list[float]]:
    """Losses where no update fails, and where one of rank 1 does that is taken back anyway, since clipping bites."""
    found = []
    for breaks_in in (-1, 2):
        with pipeline("zb-v", transport="shared") as pipe:
            optimizer = Breaking(pipe.parameters(), lr=0.01)
            optimizer.breaks_in = breaks_in if pipe.rank == 1 else -1
            steps = pipe.train_steps(batches([1.0, 1.0, 60.0, 1.0, 1.0]), optimizer, clip=LIMIT)
            found.append([result.loss.item() for result in steps])
    return found


def test_an_update_that_failed_and_is_taken_back_is_made_right_and_counted_once(ranks: KeptProcesses) -> None:
    """The rank counted it as one that was never made, so that the ranks seemed to be in different steps."""
    for right, after_a_failure in ranks.run(failed_and_taken_back):
        assert len(right) == 5
        assert after_a_failure == right
