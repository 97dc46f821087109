"""`train_steps` has the results of the loop that ends every step on all ranks together, to the last bit.

The loop that it is compared with is written out in `by_hand`. One group of processes runs all scenarios of a kind; each
returns what its rank saw.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F
from transports import ON_PROCESSES

import penstock
from penstock.errors import PenstockError, UsageError
from penstock.optim.snapshot import UpdateSnapshot
from penstock.runtime.engine.report import EndedStep
from penstock.schedule import FAMILIES, Action, Op, Schedule, search
from penstock.schedule.builders import TRAINING

WIDTH = 6
STEPS = 5
SEARCHED: dict[str, Any] = {"memory": 2, "stages_per_rank": 4, "placements": "v", "objective": "steady", "effort": 40}
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
LIMIT = 10.0  # above the norms of batches of scale 1, below those of scale 40
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


@pytest.mark.parametrize(("family", "name", "clip", "skip", "scales"), CASES[-7:])
def test_ranks_that_are_threads_train_as_the_loop_by_hand(family, name, clip, skip, scales):
    pair = []
    for way in (by_hand, overlapped):
        with pipeline(family, dtype=torch.float64) as pipe:
            pair.append(way(pipe, batches(scales, torch.float64), name, clip, skip))
    assert not differences(*pair)


# -- what happens between steps, on two processes


def hold_back(pipe: penstock.Pipeline, name: str) -> None:
    """The last rank ends each step only when the first has begun the next one: together they would never end it."""
    store, began, ended = dist.distributed_c10d._get_default_store(), [0], [0]
    last = [action for action in pipe.program.rows[1] if action.op is Op.W][-1]

    def forward(action: Action, context: Any) -> None:
        if pipe.rank == 0 and action.microbatch == 0:
            store.set(f"{name} began {began[0]}", "yes")
            began[0] += 1
        context.run(action)

    def weights(action: Action, context: Any) -> None:
        if pipe.rank == 1 and action == last:
            if 0 < ended[0] < STEPS - 1:  # a pipeline's first step ends on all ranks together
                store.wait([f"{name} began {ended[0] + 1}"], timedelta(seconds=TIMEOUT))
            ended[0] += 1
        context.run(action)

    pipe.register("F", forward)
    pipe.register("W", weights)


def ahead(transport: str) -> list[float]:
    with pipeline("zb-h2", transport=transport) as pipe:
        hold_back(pipe, transport)
        optimizer = OPTIMIZERS["sgd"](pipe.parameters())
        return [round(result.loss.item(), 6) for result in pipe.train_steps(batches(QUIET), optimizer, clip=1e9)]


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


def corrections() -> tuple[int, int]:
    """How often a snapshot was taken, and an update taken back, in a run in which clipping bites."""
    with counted_snapshots() as counts, pipeline("zb-v", transport="shared") as pipe:
        list(pipe.train_steps(batches([1.0, 1.0, 60.0, *[1.0] * 7]), OPTIMIZERS["sgd"](pipe.parameters()), clip=4.0))
    return counts["take"], counts["again"]


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


FAILING_UPDATES: dict[str, Any] = {
    "the first": (0, None),
    "early": (2, None),
    "early, with a snapshot": (2, 1e9),
    "the last": (STEPS - 1, None),
    "made again": (2, LIMIT, [1.0, 1.0, 60.0, 1.0, 1.0], 1),
    "waited for": (3, LIMIT, [1.0, 1.0, 60.0, 1.0, 1.0], 1),
}


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_while_abandoned() -> tuple[str, list[str]]:
    """Ctrl-C on rank 1 in the fourth step, which is then abandoned, since the third was clipped. And then go on."""
    scales, made = [1.0, 1.0, 40.0, 1.0, 1.0, 1.0], []
    with pipeline("1f1b", transport="shared") as pipe:
        made.append(by_hand(pipe, batches(scales), "adamw", LIMIT, False))
    with pipeline("1f1b", transport="shared") as pipe:
        calls, raised = [0], ""

        def presses(action: Action, context: Any) -> None:
            calls[0] += action.microbatch == 0
            if pipe.rank == 1 and action.microbatch == 0 and calls[0] == 4:
                press()
            context.run(action)

        pipe.register("F", presses)
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data, losses, done = list(batches(scales)), {}, 0
        while done < len(data):
            try:
                for number, result in enumerate(
                    pipe.train_steps(data[done:], optimizer, clip=LIMIT, scheduler=rate), done
                ):
                    losses[number] = result.loss.item()
                done = len(data)
            except (KeyboardInterrupt, PenstockError) as error:
                raised, done = raised + type(error).__name__, pipe.deployment.counter.step
        made.append(made[0] | {"state": state_of(pipe, optimizer)})
    assert losses == dict(enumerate(made[0]["losses"]))
    return raised, differences(*made)


class Pressing(torch.optim.SGD):
    """In one of its steps, Ctrl-C comes before the weights are updated, that many times."""

    presses = 0
    in_step = 3
    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        for _ in range(self.presses if self.done == self.in_step else 0):
            press()
        return super().step(closure)


def interrupted_in_update(
    presses: list[int], transport: str = "shared", in_step: int = 3
) -> tuple[str, str, list[float]]:
    """Ctrl-C between the report of a step and its update; then another loop, and what it says."""
    said = "nothing"
    with pipeline("1f1b", transport=transport) as pipe:
        optimizer = Pressing(pipe.parameters(), lr=0.1)
        optimizer.presses, optimizer.in_step = presses[pipe.rank], in_step
        data = list(batches(QUIET))
        begun = time.monotonic()
        try:
            for _ in pipe.train_steps(data, optimizer):
                pass
        except (KeyboardInterrupt, PenstockError) as error:
            said = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
        assert time.monotonic() - begun < TIMEOUT / 2
        try:
            after = [result.loss.item() for result in pipe.train_steps(data[in_step:], optimizer)]
        except PenstockError as error:
            return said, str(error), []
        return said, "", after


def given_up_after(number: int) -> tuple[str, str]:
    """Rank 0 has a Ctrl-C in the update of its last step before a `break`: it is raised in the next call."""
    said = ["nothing", "nothing"]
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = Pressing(pipe.parameters(), lr=0.1)
        optimizer.presses, optimizer.in_step = 1 - pipe.rank, number
        x, y = next(batches(QUIET))
        try:
            for _ in pipe.train_steps([(x, y)] * 5, optimizer):
                if optimizer.done == number:
                    break
        except KeyboardInterrupt:
            said[0] = "in the loop"
        try:
            pipe.evaluate(x, target=y)
        except (KeyboardInterrupt, PenstockError) as error:
            said[1] = f"{type(error).__name__}: {error}"
    return said[0], said[1]


def undisturbed() -> list[float]:
    """The last two losses of the same loop without Ctrl-C."""
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        return [result.loss.item() for result in pipe.train_steps(batches(QUIET), optimizer)][3:]


def interrupted_while_collecting() -> tuple[str, list[str]]:
    """Rank 0 waits for the report of the last step, which is clipped, and Ctrl-C ends that; it settles later."""
    scales, made = [1.0, 1.0, 1.0, 40.0], []
    store = dist.distributed_c10d._get_default_store()
    with pipeline("zb-h2", transport="shared") as pipe:
        made.append(by_hand(pipe, batches(scales), "adamw", LIMIT, False))
    with pipeline("zb-h2", transport="shared") as pipe:
        last, calls = [action for action in pipe.program.rows[1] if action.op is Op.W][-1], [0]

        def waits(action: Action, context: Any) -> None:
            calls[0] += pipe.rank == 1 and action == last
            if pipe.rank == 1 and action == last and calls[0] == len(scales):
                store.wait(["left the wait"], timedelta(seconds=TIMEOUT))
            context.run(action)

        pipe.register("W", waits)
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses, norms, raised = [], [], "nothing"

        def data() -> Iterator[Any]:
            yield from batches(scales)
            if pipe.rank == 0:  # the last step is run, and the loop is about to wait for its reports
                threading.Timer(0.3, press).start()

        try:
            for result in pipe.train_steps(data(), optimizer, clip=LIMIT, scheduler=rate):
                losses.append(result.loss.item())
                norms.append(result.norm.item())
        except KeyboardInterrupt:
            raised = "KeyboardInterrupt"
            store.set("left the wait", "yes")
        pipe.settle()
        made.append({"losses": losses, "norms": norms, "updated": [True] * 4, "state": state_of(pipe, optimizer)})
    if raised != "nothing":  # the result of the last step never came
        made[0] |= {name: made[0][name][:3] for name in ("losses", "norms")}
    return raised, differences(*made)


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


def with_a_body(clip: float) -> tuple[list[str], int]:
    """The body of either loop sets the learning rate, and keeps a mean of the weights that it sees."""
    scales, made, bodies = [1.0, 1.0, 1.0, 40.0, 1.0, 1.0, 30.0], [], 0

    def body(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (2 + number)
        mean.update_parameters(own)

    for by_hand in (False, True):
        with pipeline("1f1b", transport="shared") as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
            own = nn.ParameterList(pipe.parameters())
            mean = torch.optim.swa_utils.AveragedModel(own, avg_fn=lambda mean, value, _: 0.5 * mean + 0.5 * value)
            if by_hand:
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


def with_hook() -> list[str]:
    """An optimizer whose hook may do anything: why its steps ended together."""
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: None)
        return [result.together for result in pipe.train_steps(batches(QUIET), optimizer, clip=LIMIT)]


CHANGES = "in place", "by its data", "its gradient", "on rank 1", "after settle()"


def scenarios(folder: str) -> dict[str, Any]:
    return {
        "body": [with_a_body(clip) for clip in (LIMIT, 2.0, 1e9)],
        "hook": with_hook(),
        "changing": {way: changing_weights(way) for way in CHANGES},
        "ahead": [ahead(transport) for transport in ON_PROCESSES],
        "corrections": corrections(),
        "ends last": ends_last(),
        "between": between(folder),
        "late": failing("W-1", 2),
        "late with clipping": failing("W-1", 2, 1e9),
        "repaired": repaired(),
        "taken back": failed_and_taken_back(),
        "interrupted while abandoned": interrupted_while_abandoned(),
        "interrupted in update": (interrupted_in_update([1, 1]), undisturbed()),
        "interrupted on one": [interrupted_in_update([0, 1], transport) for transport in ON_PROCESSES],
        "interrupted on one in its last update": interrupted_in_update([0, 1], in_step=STEPS),
        "interrupted before a break": given_up_after(3),
        "interrupted while collecting": interrupted_while_collecting(),
        "update": {
            (name, transport): failing_update(transport, *case)
            for name, case in FAILING_UPDATES.items()
            for transport in ON_PROCESSES
        },
        "early": failing("F0", 2),
        "while updates wait": failing("F0", 4, 1e-3),
        "no parameters": with_a_rank_without_parameters(),
        "last": failing("F0", 5),
        "tied": tied(),
        "ragged": ragged(),
        "leaving": (leaving(), going_on()),
        "interrupted in half an update": interrupted_in_update([2, 0]),  # the last: the group is given up
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_processes(2, scenarios, str(tmp_path_factory.mktemp("checkpoints")))


def test_a_rank_begins_the_next_step_while_another_is_in_the_last(seen):
    assert [len(losses) for losses in seen[0]["ahead"]] == [STEPS, STEPS]
    assert seen[0]["ahead"] == seen[1]["ahead"]


def test_a_wrong_update_is_taken_back_once_and_then_updates_wait(seen):
    """Ten steps, clipped in the third. The first ends together; the updates of the second, of the third (wrong) and,
    after four that have waited, of two of the last three are made early: the last waits for the end of the loop. Rank 0
    may know that some of these are right.
    """
    (taken, back), others = (rank["corrections"] for rank in seen)
    assert taken <= 2 + 2
    assert back == 1
    assert others == (2 + 2, 1)


def test_the_rank_that_ends_last_knows_all_reports_and_takes_no_snapshot(seen):
    assert [rank["ends last"] for rank in seen] == [(0, []), (STEPS - 2, [])]


def test_an_evaluation_inside_of_the_loop_sees_the_right_weights(seen):
    for rank in seen:
        plain, found = rank["between"]["plain"], rank["between"]["seen"]
        assert found == {step: plain[step] for step in found}
        assert {4, 6} <= found.keys()


def test_a_checkpoint_of_the_loop_resumes_with_the_same_losses(seen):
    assert all(rank["between"]["resumed"] for rank in seen)


def test_a_failure_that_others_are_ahead_of_names_its_step_and_refuses_to_go_on(seen):
    """Without clipping there is no copy of the weights, by which those that are ahead could take their update back."""
    for rank in seen:
        (said, _), notes, after = rank["late"]
        assert "rank 1" in said
        assert "broken on purpose" in said
        assert any("in step 2 of train_steps()" in note and "load a checkpoint" in note for note in notes)
        assert "not completed, or not updated, on every rank, so that the ranks no longer belong together" in after


def test_a_failure_that_others_are_ahead_of_is_undone_on_all_of_them_by_their_snapshots(seen):
    for rank in seen:
        (said, results), notes, after = rank["late with clipping"]
        assert "broken on purpose" in said
        assert any("in step 2 of train_steps()" in note and "undone on every rank" in note for note in notes)
        assert results == "2 results"
        assert after == "went on: True"
        assert rank["repaired"] == []  # to the last bit, buffers and optimizer state included


@pytest.mark.parametrize("transport", ON_PROCESSES)
@pytest.mark.parametrize("case", FAILING_UPDATES)
def test_an_optimizer_that_fails_on_one_rank_is_named_by_all_with_its_error_and_step(seen, case, transport):
    """The others were not told, and took the rank for one that had left, or that was in another call."""
    for rank in range(2):
        kind, text, cause, *notes, after = seen[rank]["update"][case, transport]
        assert "an optimizer that breaks" in text
        assert f"in the update after step {FAILING_UPDATES[case][0]} of train_steps(), counted from 0" in "".join(notes)
        assert "load a checkpoint on every rank" in "".join(notes)
        assert "not completed, or not updated, on every rank, so that the ranks no longer belong together" in after
        if rank == 1:
            assert kind == "ValueError" or cause == "ValueError('an optimizer that breaks')"
        else:
            assert kind == "PeerFailure"
            assert text.startswith(f"rank 1 failed (action update after step {FAILING_UPDATES[case][0]}): ValueError")


def test_an_update_that_failed_and_is_taken_back_is_made_right_and_counted_once(seen):
    """The rank counted it as one that was never made, so that the ranks seemed to be in different steps."""
    for rank in seen:
        right, after_a_failure = rank["taken back"]
        assert len(right) == 5
        assert after_a_failure == right


def test_the_body_sees_the_weights_and_sets_the_learning_rate_as_in_the_plain_loop(seen):
    """It saw an update that was taken back later: an average of weights was off by 0.001 to 0.008 in silence. And a
    rate that it set was for the update after the next.
    """
    for rank in seen:
        assert [found for found, _ in rank["body"]] == [[], [], []]
        assert rank["body"][-1][1] == 6  # all but the first overlap


def test_updates_that_no_snapshot_has_all_of_end_together(seen):
    for rank in seen:
        assert rank["hook"] == [
            "the first step of a pipeline",
            *["hooks of the optimizer, or objects that it holds"] * (STEPS - 1),
        ]


@pytest.mark.parametrize("way", CHANGES)
def test_weights_that_the_body_changes_before_all_ranks_are_done_are_refused(seen, way):
    """What the body had done was undone with the update. After settle() no update can be taken back any more.

    Where one rank has done so, the others waited for it, and were not told why it had left.
    """
    for number, rank in enumerate(seen):
        said = rank["changing"][way]
        if way == "after settle()":
            assert said == "nothing"
        elif way == "on rank 1" and number == 0:
            assert said.startswith("rank 1 failed: UsageError: parameter 1.linear.weight (or its gradient) was changed")
        else:
            assert f"parameter {number}.linear.weight (or its gradient) was changed in the body" in said
            assert "call pipe.settle() before" in said


def test_ctrl_c_in_a_step_that_is_abandoned_is_not_lost(seen):
    """The step runs again, because the update before it was wrong; on the rank that was stopped it is refused then."""
    assert [rank["interrupted while abandoned"] for rank in seen] == [("PeerFailure", []), ("KeyboardInterrupt", [])]


def test_ctrl_c_between_report_and_update_waits_for_the_update(seen):
    for rank in seen:
        (said, refused, after), whole = rank["interrupted in update"]
        assert said.startswith("KeyboardInterrupt")
        assert not refused
        assert after == whole


def test_ctrl_c_in_the_update_of_one_rank_is_told_to_all_in_the_next_step(seen):
    """The others waited for that rank in the next step until the timeout, and said that it was silent."""
    _, whole = seen[0]["interrupted in update"]
    for own, other in zip(seen[1]["interrupted on one"], seen[0]["interrupted on one"], strict=True):
        assert own[0].startswith("KeyboardInterrupt: ")
        assert other[0].startswith("PeerFailure: rank 1 failed (stage 1, action 1RECV_F0, microbatch 0): KeyboardInt")
        for said, refused, after in (own, other):
            assert "in step 3 of train_steps(), counted from 0; it is undone on every rank" in said
            assert not refused
            assert after == whole


def test_ctrl_c_in_the_last_update_of_a_loop_is_raised_at_its_end(seen):
    assert [rank["interrupted on one in its last update"][0] for rank in seen] == ["nothing", "KeyboardInterrupt:  "]


def test_ctrl_c_in_the_last_update_before_a_break_is_raised_in_the_next_call_on_all_ranks(seen):
    (_, said), (_, others) = [rank["interrupted before a break"] for rank in seen]
    assert [rank["interrupted before a break"][0] for rank in seen] == ["nothing", "nothing"]
    assert said == "KeyboardInterrupt: "
    assert others.startswith("PeerFailure: rank 0 failed (stage 0, action 0F0, microbatch 0): KeyboardInterrupt: ")


def test_a_rank_that_is_stopped_by_force_in_its_update_gives_the_group_up(seen):
    """The second Ctrl-C does not wait: rank 0 has updated nothing, rank 1 has."""
    said = [rank["interrupted in half an update"][0] for rank in seen]
    assert said[0].startswith("KeyboardInterrupt: ")
    assert said[1].startswith("PeerFailure: rank 0 failed: KeyboardInterrupt: Ctrl-C, again,")
    for rank in seen:
        assert "the group must be rebuilt" in rank["interrupted in half an update"][1]


def test_ctrl_c_in_the_wait_for_reports_leaves_them_to_be_collected_later(seen):
    assert [rank["interrupted while collecting"] for rank in seen] == [("KeyboardInterrupt", []), ("nothing", [])]


def test_a_failure_that_reaches_every_rank_is_undone_and_training_can_go_on(seen):
    for rank in seen:
        (said, results), notes, after = rank["early"]
        assert "broken on purpose" in said
        assert any("undone on every rank" in note for note in notes)
        assert results == "2 results"
        assert after == "went on: True"


def test_a_failure_in_a_step_whose_update_waits_for_all_ranks_names_its_step(seen):
    """The second step is clipped, so that the third runs twice and ends together with those after it."""
    for rank in seen:
        (said, results), notes, after = rank["while updates wait"]
        assert "broken on purpose" in said
        assert any("in step 3 of train_steps(), counted from 0; it is undone on every rank" in note for note in notes)
        assert results == "3 results"
        assert after == "went on: True"


def test_a_rank_without_parameters_takes_part_with_groups_by_name(seen):
    """Its optimizer, which has no parameter at all, was refused."""
    assert [rank["no parameters"] for rank in seen] == [[], []]


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


def test_batches_that_are_split_by_their_lengths_overlap_with_the_results_of_the_loop_by_hand(seen):
    for rank in seen:
        same, counts, together, said = rank["ragged"]
        assert same
        assert len(set(counts)) > 1
        assert together == ["the first step of a pipeline", *[""] * 5]
        assert "both ranks must run the same program" in said  # where one rank's lengths are others


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
