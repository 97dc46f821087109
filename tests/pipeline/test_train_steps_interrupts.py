"""Ctrl-C in `train_steps`, on one rank or on all: no step is torn, and the results are those of a whole run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from kept_processes import KeptProcesses
from pipeline.loops import LIMIT, OPTIMIZERS, QUIET, STEPS, batches, by_hand, differences, pipeline, press, state_of
from processes import on_processes
from transports import ON_PROCESSES

from penstock.errors import PenstockError
from penstock.schedule import Action, Op


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptProcesses]:
    with KeptProcesses(2) as kept:
        yield kept


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


def test_ctrl_c_in_a_step_that_is_abandoned_is_not_lost(ranks: KeptProcesses) -> None:
    """The step runs again, because the update before it was wrong; on the rank that was stopped it is refused then."""
    assert ranks.run(interrupted_while_abandoned) == [("PeerFailure", []), ("KeyboardInterrupt", [])]


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


def undisturbed() -> list[float]:
    with pipeline("1f1b", transport="shared") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        return [result.loss.item() for result in pipe.train_steps(batches(QUIET), optimizer)][3:]


@pytest.fixture(scope="module")
def whole(ranks: KeptProcesses) -> list[float]:
    """The last two losses of the same loop without Ctrl-C."""
    return list(ranks.run(undisturbed)[0])


def test_ctrl_c_between_report_and_update_waits_for_the_update(ranks: KeptProcesses, whole: list[float]) -> None:
    for said, refused, after in ranks.run(interrupted_in_update, [1, 1]):
        assert said.startswith("KeyboardInterrupt")
        assert not refused
        assert after == whole


@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_ctrl_c_in_the_update_of_one_rank_is_told_to_all_in_the_next_step(
    ranks: KeptProcesses, whole: list[float], transport: str
) -> None:
    """The others waited for that rank in the next step until the timeout, and said that it was silent."""
    other, own = ranks.run(interrupted_in_update, [0, 1], transport)
    assert own[0].startswith("KeyboardInterrupt: ")
    assert other[0].startswith("PeerFailure: rank 1 failed (stage 1, action 1RECV_F0, microbatch 0): KeyboardInt")
    for said, refused, after in (own, other):
        assert "in step 3 of train_steps(), counted from 0; it is undone on every rank" in said
        assert not refused
        assert after == whole


def test_ctrl_c_in_the_last_update_of_a_loop_is_raised_at_its_end(ranks: KeptProcesses) -> None:
    found = ranks.run(interrupted_in_update, [0, 1], "shared", STEPS)
    assert [said for said, _, _ in found] == ["nothing", "KeyboardInterrupt:  "]


@pytest.mark.slow
def test_a_rank_that_is_stopped_by_force_in_its_update_gives_the_group_up() -> None:
    """The second Ctrl-C does not wait: rank 0 has updated nothing, rank 1 has."""
    found = on_processes(2, interrupted_in_update, [2, 0])  # a group of its own, of which there is no use then
    assert found[0][0].startswith("KeyboardInterrupt: ")
    assert found[1][0].startswith("PeerFailure: rank 0 failed: KeyboardInterrupt: Ctrl-C, again,")
    for _, refused, _ in found:
        assert "the group must be rebuilt" in refused


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


def test_ctrl_c_in_the_last_update_before_a_break_is_raised_in_the_next_call_on_all_ranks(
    ranks: KeptProcesses,
) -> None:
    own, other = ranks.run(given_up_after, 3)
    assert own == ("nothing", "KeyboardInterrupt: ")
    assert other[0] == "nothing"
    assert other[1].startswith("PeerFailure: rank 0 failed (stage 0, action 0F0, microbatch 0): KeyboardInterrupt: ")


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


def test_ctrl_c_in_the_wait_for_reports_leaves_them_to_be_collected_later(ranks: KeptProcesses) -> None:
    assert ranks.run(interrupted_while_collecting) == [("KeyboardInterrupt", []), ("nothing", [])]
