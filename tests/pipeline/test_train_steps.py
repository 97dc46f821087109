"""`train_steps` has the results of the loop that ends every step on all ranks together, to the last bit.

The loop that it is compared with is written out in `by_hand`. One group of processes runs all scenarios of a kind; each
returns what its rank saw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError, UsageError
from penstock.optim.snapshot import UpdateSnapshot
from penstock.schedule import FAMILIES, Action, Op, Schedule, search

WIDTH = 6
STEPS = 5
SEARCHED: dict[str, Any] = {"memory": 2, "stages_per_rank": 4, "placements": "v", "objective": "steady", "effort": 40}
TRAINING = [name for name in FAMILIES if name != "forward-only"]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=torch.tensor(0.1, dtype=torch.float64), momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Block(nn.Module):
    """A layer with random numbers and a buffer that changes, which refuses what a spoiled weight would give it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("numbers that are not finite")
        if self.training:
            self.seen += 1
        return torch.tanh(self.drop(self.norm(self.linear(x))))


def pipeline(schedule: str, ranks: int = 2, transport: str | None = None, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    chosen = search(ranks, 4, **SEARCHED) if schedule == "steady" else schedule
    stages = chosen.stages if isinstance(chosen, Schedule) else ranks * FAMILIES[schedule].stages_per_rank
    dtype = options.pop("dtype", torch.float32)
    model = [Block().to(dtype) for _ in range(stages)]
    given = {"microbatches": 4, "loss_fn": F.mse_loss, "seed": 3, "timeout": TIMEOUT, **options}
    return penstock.Pipeline(model, schedule=chosen, transport=transport, **given)


def batches(scales: list[float], dtype: torch.dtype = torch.float32) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of different sizes, whose targets are that large: so are the gradients. Drawn one after the other from a
    generator of their own, or in float64 from torch's, as by a data set that changes its samples at random.
    """
    made = torch.Generator() if dtype is torch.float32 else torch.default_generator
    made.manual_seed(4)
    for number, scale in enumerate(scales):
        rows = 9 + number % 3
        x, y = torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made)
        yield x.to(dtype), scale * y.to(dtype)


def state_of(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    inside = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*pipe.state_dict().values(), *inside)]


def by_hand(pipe: penstock.Pipeline, data: Any, name: str, clip: float | None, skip: bool) -> dict[str, Any]:
    optimizer = OPTIMIZERS[name](pipe.parameters())
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, norms, updated = [], [], []
    for x, y in data:
        loss = pipe.step(x, target=y).loss
        norm = pipe.grad_norm() if clip is None else pipe.clip_grad_norm_(clip)
        losses.append(loss.item())
        norms.append(norm.item())
        updated.append(not skip or (math.isfinite(norm) and math.isfinite(loss)))
        if updated[-1]:
            optimizer.step()
        rate.step()
        pipe.zero_grad()
    return {"losses": losses, "norms": norms, "updated": updated, "state": state_of(pipe, optimizer)}


def overlapped(pipe: penstock.Pipeline, data: Any, name: str, clip: float | None, skip: bool) -> dict[str, Any]:
    optimizer = OPTIMIZERS[name](pipe.parameters())
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    results = list(pipe.train_steps(data, optimizer, clip=clip, scheduler=rate, skip_nonfinite=skip))
    return {
        "losses": [result.loss.item() for result in results],
        "norms": [None if result.norm is None else result.norm.item() for result in results],
        "updated": [result.updated for result in results],
        "state": state_of(pipe, optimizer),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = [name for name in ("losses", "updated") if repr(one[name]) != repr(other[name])]
    if repr(one["norms"]) != repr(other["norms"]) and None not in other["norms"]:
        found.append(f"norms {one['norms']} {other['norms']}")
    if len(one["state"]) != len(other["state"]):
        return [*found, "length of state"]
    apart = [not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one["state"], other["state"], strict=True)]
    return [*found, *[f"state {number}" for number, odd in enumerate(apart) if odd]]


QUIET, BITES = [1.0] * STEPS, [1.0, 1.0, 40.0, 1.0, 30.0, 1.0]
SPOILED = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0]
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


def compared(transport: str, cases: list[Any], ranks: int) -> dict[str, list[str]]:
    found = {}
    for family, name, clip, skip, scales in cases:
        pair = []
        for way in (by_hand, overlapped):
            with pipeline(family, ranks, transport, dtype=torch.float64) as pipe:
                pair.append(way(pipe, batches(scales, torch.float64), name, clip, skip))
        found[f"{family} {name} {clip} {skip}"] = differences(*pair)
    return found


FAST = [case for case in CASES if case[0] in ("zb-v", "steady")]


def test_a_v_schedule_trains_as_the_loop_by_hand_on_processes():
    for found in on_processes(2, compared, "shared", FAST, 2):
        assert not {case: apart for case, apart in found.items() if apart}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "distributed"])
def test_every_family_trains_as_the_loop_by_hand_on_processes(transport):
    for found in on_processes(2, compared, transport, CASES, 2):
        assert not {case: apart for case, apart in found.items() if apart}


EVERYTHING = [
    (family, name, clip, skip, scales)
    for family in TRAINING
    for name in OPTIMIZERS
    for clip, skip, scales in ((None, False, QUIET), (2.0, False, BITES), (5.0, True, SPOILED))
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["shared", "distributed"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_family_optimizer_and_rule_on_processes(transport, ranks):
    for found in on_processes(ranks, compared, transport, EVERYTHING, ranks):
        assert not {case: apart for case, apart in found.items() if apart}


@pytest.mark.parametrize(("family", "name", "clip", "skip", "scales"), CASES[-7:])
def test_ranks_that_are_threads_train_as_the_loop_by_hand(family, name, clip, skip, scales):
    pair = []
    for way in (by_hand, overlapped):
        with pipeline(family, dtype=torch.float64) as pipe:
            pair.append(way(pipe, batches(scales, torch.float64), name, clip, skip))
    assert not differences(*pair)


# -- what happens between steps, on two processes


def ahead(transport: str) -> list[float]:
    """The last rank ends each step only when the first has begun the next one: together they would never end it."""
    store = dist.distributed_c10d._get_default_store()
    with pipeline("zb-h2", transport=transport) as pipe:
        began, ended, last = [0], [0], [action for action in pipe.program.rows[1] if action.op is Op.W][-1]

        def forward(action: Action, context: Any) -> None:
            if pipe.rank == 0 and action.microbatch == 0:
                store.set(f"{transport} began {began[0]}", "yes")
                began[0] += 1
            context.run(action)

        def weights(action: Action, context: Any) -> None:
            if pipe.rank == 1 and action == last:
                if 0 < ended[0] < STEPS - 1:  # a pipeline's first step ends on all ranks together
                    store.wait([f"{transport} began {ended[0] + 1}"], timedelta(seconds=TIMEOUT))
                ended[0] += 1
            context.run(action)

        pipe.register("F", forward)
        pipe.register("W", weights)
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        return [round(result.loss.item(), 6) for result in pipe.train_steps(batches(QUIET), optimizer, clip=1e9)]


def corrections() -> tuple[int, int]:
    """How often an update was taken back, and how often ranks waited for the norm, in a run in which clipping bites."""
    counts = {"put_back": 0, "take": 0}
    for name in counts:
        original = getattr(UpdateSnapshot, name)

        def counted(self: Any, name: str = name, original: Any = original) -> None:
            counts[name] += 1
            original(self)

        setattr(UpdateSnapshot, name, counted)
    with pipeline("zb-v", transport="shared") as pipe:
        list(pipe.train_steps(batches([1.0, 1.0, 60.0, *[1.0] * 7]), OPTIMIZERS["sgd"](pipe.parameters()), clip=4.0))
    return counts["take"], counts["put_back"]


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


def failing(action_of: str, number: int) -> tuple[list[str], list[str], str]:
    """Rank 1 fails in the step of that number, counted from 0: what is raised, its notes, and whether one can go on."""
    with pipeline("zb-h2", transport="shared") as pipe:
        row = [action for action in pipe.program.rows[1] if str(action.op.name) == action_of[0]]
        where, calls = row[int(action_of[1:])], [0]

        def breaks(action: Action, context: Any) -> None:
            if pipe.rank == 1 and action == where:
                calls[0] += 1
                if calls[0] == number + 1:
                    raise ValueError("broken on purpose")
            context.run(action)

        pipe.register(action_of[0], breaks)
        optimizer, results = OPTIMIZERS["sgd"](pipe.parameters()), []
        try:
            for result in pipe.train_steps(batches([1.0] * 6), optimizer):
                results.append(result.loss.item())
        except PenstockError as error:
            said, notes = str(error), list(error.__notes__)
        try:
            after = f"went on: {pipe.step(*next(batches([1.0]))[:1], target=next(batches([1.0]))[1]).loss is not None}"
        except PenstockError as error:
            after = str(error)
        return [said, f"{len(results)} results"], notes, after


def tied() -> list[str]:
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


def scenarios(folder: str) -> dict[str, Any]:
    return {
        "ahead": [ahead(transport) for transport in ("shared", "distributed")],
        "corrections": corrections(),
        "between": between(folder),
        "late": failing("W-1", 2),
        "early": failing("F0", 2),
        "last": failing("F0", 5),
        "tied": tied(),
        "leaving": (leaving(), going_on()),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_processes(2, scenarios, str(tmp_path_factory.mktemp("checkpoints")))


def test_a_rank_begins_the_next_step_while_another_is_in_the_last(seen):
    assert [len(losses) for losses in seen[0]["ahead"]] == [STEPS, STEPS]
    assert seen[0]["ahead"] == seen[1]["ahead"]


def test_a_wrong_update_is_taken_back_once_and_then_updates_wait(seen):
    """Ten steps, clipped in the third. The first ends together; the updates of the second, of the third (wrong) and,
    after four that have waited, of the last three are made early.
    """
    for rank in seen:
        assert rank["corrections"] == (2 + 3, 1)


def test_an_evaluation_inside_of_the_loop_sees_the_right_weights(seen):
    for rank in seen:
        plain, found = rank["between"]["plain"], rank["between"]["seen"]
        assert found == {step: plain[step] for step in found}
        assert {4, 6} <= found.keys()


def test_a_checkpoint_of_the_loop_resumes_with_the_same_losses(seen):
    assert all(rank["between"]["resumed"] for rank in seen)


def test_a_failure_that_others_are_ahead_of_names_its_step_and_refuses_to_go_on(seen):
    for rank in seen:
        (said, _), notes, after = rank["late"]
        assert "rank 1" in said
        assert "broken on purpose" in said
        assert any("in step 2 of train_steps()" in note and "load a checkpoint" in note for note in notes)
        assert "not completed the same number of steps" in after


def test_a_failure_that_reaches_every_rank_is_undone_and_training_can_go_on(seen):
    for rank in seen:
        (said, results), notes, after = rank["early"]
        assert "broken on purpose" in said
        assert any("undone on every rank" in note for note in notes)
        assert results == "2 results"
        assert after == "went on: True"


def test_a_failure_in_the_last_step_is_raised_at_the_end_of_the_loop(seen):
    for rank in seen:
        (said, results), _, after = rank["last"]
        assert "broken on purpose" in said
        assert results == "5 results"
        assert after == "went on: True"


def test_a_rank_that_leaves_its_loop_waits_for_nobody_and_its_update_is_checked_later(seen):
    """The step that was not collected is the one in which clipping bites: the next loop first makes that right."""
    for rank in seen:
        left, whole = rank["leaving"]
        assert left == whole
        assert len(left) == STEPS


def test_tied_weights_across_ranks_train_as_the_loop_by_hand(seen):
    assert seen[0]["tied"] == seen[1]["tied"] == []


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
