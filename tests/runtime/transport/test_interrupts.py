"""Ctrl-C at any moment of a step: raised where it came, told to the others, and the next step is exact."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import launch, on_processes
from tiers import by_turns, mostly_slow
from torch import nn

import penstock
from penstock.errors import PeerFailure
from penstock.pipeline.batches import Batches
from penstock.runtime.engine.executor import Executor
from penstock.runtime.transport import interrupts
from penstock.runtime.transport.distributed.exchange import Exchange
from penstock.runtime.transport.distributed.incoming import DistributedIncoming
from penstock.runtime.transport.interrupts import CTRL_C, TRANSITIONS, State, uninterrupted

ROUNDS = 25


class Slow(nn.Linear):
    """Each forward tells that it has begun, and takes a moment."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.begun = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.set()
        time.sleep(0.001)
        return super().forward(x)


def press(begun: threading.Event, delay: float) -> None:
    begun.wait()
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(say: Callable[[Any], None], victim: int, family: str, stages: int, transport: str) -> None:
    """One step a round on both ranks, and one Ctrl-C on the victim: in the step, or after it where that came late."""
    torch.manual_seed(0)
    model = [Slow() for _ in range(stages)]
    pipe = penstock.Pipeline(
        model, microbatches=8, schedule=family, loss_fn=nn.functional.mse_loss, timeout=20, transport=transport
    )
    x = torch.ones(8, 8)
    due = pipe.step(x, target=x).loss
    chance = random.Random(victim)
    first = model[pipe.schedule.placement.stages_of(dist.get_rank())[0]]
    told = []
    for _ in range(ROUNDS):
        first.begun.clear()
        try:
            if dist.get_rank() == victim:
                threading.Thread(target=press, args=(first.begun, chance.random() / 50)).start()
            assert pipe.step(x, target=x).loss == due
            if dist.get_rank() == victim:
                time.sleep(5)
            told.append("nothing")
        except (KeyboardInterrupt, PeerFailure) as error:
            told.append(type(error).__name__)
    say(told)
    say(bool(pipe.step(x, target=x).loss == due))
    pipe.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("victim", "family", "stages", "transport"),
    mostly_slow(
        [(1, "1f1b", 2, "shared"), (0, "zb-v", 4, "shared"), (1, "1f1b", 2, "distributed")], (0, "zb-v", 4, "shared")
    ),
)
def test_ctrl_c_at_random_moments_leaves_the_links_in_order(
    victim: int, family: str, stages: int, transport: str
) -> None:
    endings = launch(2, interrupted, victim, family, stages, transport)
    for rank, ending in enumerate(endings):
        assert len(ending.said) == 2, ending.error[-2000:]
        assert ending.said[1] is True
        if rank == victim:
            assert ending.said[0] == ["KeyboardInterrupt"] * ROUNDS
        else:
            assert "PeerFailure" in ending.said[0]


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@uninterrupted
def a_message() -> None:
    """Ctrl-C comes in the middle of it, some calls below."""
    ctrl_c()


def test_the_states_are_those_that_are_drawn() -> None:
    drawn: dict[str, dict[str, str]] = {}
    for line in (interrupts.__doc__ or "").splitlines():
        if line.startswith("    "):
            state, *rest = line.split()
            for arrow, following in zip(rest[::2], rest[1::2], strict=True):
                assert drawn.setdefault(state, {}).setdefault(arrow.strip("->"), following) == following
                state = following
    assert drawn == {
        state.value: {event: to.value for event, to in events.items()} for state, events in TRANSITIONS.items()
    }
    assert set(TRANSITIONS) == set(State)


def test_one_that_is_owed_is_raised_before_the_first_action_of_the_next_step_or_at_the_end_of_the_loop() -> None:
    for ends in (False, True):
        with CTRL_C.around_step(in_loop=True):
            ctrl_c()
        assert CTRL_C.state is State.OWED
        if ends:
            with pytest.raises(KeyboardInterrupt):
                CTRL_C.raise_owed()
        else:
            with CTRL_C.around_step(in_loop=True):
                CTRL_C.go("open")
                with pytest.raises(KeyboardInterrupt):
                    CTRL_C.raise_due()
        assert CTRL_C.state is State.OUTSIDE


def test_one_that_comes_by_force_gives_the_group_up() -> None:
    given_up = []

    def step() -> None:
        with CTRL_C.around_step(give_up=lambda: given_up.append(True)):
            ctrl_c()  # as the step is prepared: the others could not be told
            ctrl_c()

    with pytest.raises(KeyboardInterrupt):
        step()
    assert given_up == [True]


def test_a_call_that_settles_may_be_left_where_it_waits() -> None:
    with CTRL_C.around_step(settles=True):
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            CTRL_C.raise_due()


def test_it_is_held_back_for_a_message_and_raised_after_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with CTRL_C.around_step():
        CTRL_C.go("open")
        a_message()
        with pytest.raises(KeyboardInterrupt):
            CTRL_C.raise_due()
        ctrl_c()  # the step is being left because of the first one: it waits for that
        assert CTRL_C.state is not State.CUT
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()  # one more does not
        assert CTRL_C.state is State.CUT
    assert signal.getsignal(signal.SIGINT) is before


def test_one_that_comes_while_another_is_raised_is_not_raised_after_it_and_its_notes_stay() -> None:
    def step(error: BaseException) -> None:
        with CTRL_C.around_step():
            CTRL_C.go("close")
            ctrl_c()
            error.add_note("in step 3")
            raise error

    first = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as raised:
        step(first)
    assert raised.value is first
    with pytest.raises(KeyboardInterrupt) as raised:
        step(PeerFailure(1, "broken"))
    assert raised.value.__notes__ == ["in step 3"]  # which step it was is known to this rank too


def test_a_wait_may_be_left_but_not_where_the_step_ends_and_the_second_one_never_waits() -> None:
    with CTRL_C.around_step():
        CTRL_C.go("open")
        a_message()
        with pytest.raises(KeyboardInterrupt):
            CTRL_C.raise_due()
        CTRL_C.go("close")
        ctrl_c()
        CTRL_C.raise_due()
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


def test_one_that_comes_before_the_first_action_is_raised_there() -> None:
    with CTRL_C.around_step():
        ctrl_c()
        CTRL_C.go("open")
        with pytest.raises(KeyboardInterrupt):
            CTRL_C.raise_due()


def test_what_came_while_the_step_ended_is_raised_after_it() -> None:
    done = []

    def step() -> None:
        with CTRL_C.around_step():
            CTRL_C.go("close")
            ctrl_c()
            done.append("the exchange")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert done == ["the exchange"]


class Dying:
    def __del__(self) -> None:
        ctrl_c()
        ENDED.append("the finaliser")


ENDED: list[str] = []


def test_it_is_not_lost_in_a_finaliser_and_the_finaliser_runs_to_its_end() -> None:
    with CTRL_C.around_step():
        CTRL_C.go("open")
        dying = Dying()
        del dying
        assert ENDED == ["the finaliser"]
        with pytest.raises(KeyboardInterrupt):
            CTRL_C.raise_due()


def test_one_that_comes_as_the_step_ends_does_not_leave_the_next_without_care(monkeypatch: pytest.MonkeyPatch) -> None:
    set_handler = signal.signal

    def set_and_press(number: int, handler: Any) -> Any:
        old = set_handler(number, handler)
        if handler is before:
            ctrl_c()
        return old

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", set_and_press)
        with pytest.raises(KeyboardInterrupt), CTRL_C.around_step():
            pass
    with CTRL_C.around_step():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


EARLY: dict[str, tuple[Any, str]] = {
    "as the batch is split": (Batches, "resolve"),
    "between the post of the receive for the step's report and its filing": (Exchange, "_post"),
}


def interrupted_as_the_step_begins(place: str, victim: int) -> list[str]:
    """Ctrl-C in one place, early in a step: what that step and the next one end with."""
    owner, name = EARLY[place]
    pipe = penstock.Pipeline(
        [nn.Linear(8, 8), nn.Linear(8, 8)],
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        transport="distributed",
        timeout=20,
    )
    x = torch.ones(8, 8)
    pipe.step(x, target=x)
    real, armed = getattr(owner, name), [dist.get_rank() == victim]

    def press_after(*args: Any) -> Any:
        found = real(*args)
        if armed[0]:
            armed[0] = False
            signal.raise_signal(signal.SIGINT)
        return found

    setattr(owner, name, press_after)
    ends = []
    for _ in range(2):
        try:
            ends.append(f"{pipe.step(x, target=x).loss is not None}")
        except (KeyboardInterrupt, PeerFailure) as error:
            ends.append(type(error).__name__)
    pipe.close()
    return ends


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", EARLY)
def test_ctrl_c_as_a_step_begins_leaves_no_receive_behind_and_no_rank_waiting(place: str, victim: int) -> None:
    """A receive was forgotten and posted again; the first one took the peer's report, and both ranks waited.

    And a rank that had not come to its first action told nobody that it had left: the other waited for the timeout.
    """
    found = on_processes(2, interrupted_as_the_step_begins, place, victim)
    assert found[victim] == ["KeyboardInterrupt", "True"]
    assert found[1 - victim] == ["PeerFailure", "True"]


PLACES: dict[str, tuple[Any, str, bool]] = {  # where Ctrl-C comes, and whether one has come in a compute before
    "a message": (DistributedIncoming, "_arrive", False),
    "the end of a failed step": (Executor, "_drain", True),
    "the exchange": (Exchange, "collect", False),
}


def interrupted_twice(place: str, victim: int) -> list[str]:
    """Two Ctrl-C in one place of a step: what that step and the next one end with."""
    owner, name, failed = PLACES[place]
    model = [Slow(), Slow()]
    pipe = penstock.Pipeline(model, microbatches=4, loss_fn=nn.functional.mse_loss, transport="distributed", timeout=20)
    x = torch.ones(8, 8)
    pipe.step(x, target=x)
    real, armed = getattr(owner, name), [dist.get_rank() == victim]

    def twice(*args: Any) -> Any:
        found = real(*args) if place == "a message" else None
        if armed[0]:
            armed[0] = False
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
        return found if place == "a message" else real(*args)

    setattr(owner, name, twice)
    if failed and armed[0]:
        model[victim].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    ends = []
    for _ in range(2):
        try:
            ends.append(f"{pipe.step(x, target=x).loss is not None}")
        except KeyboardInterrupt as error:
            again = any("can be run again" in note for note in getattr(error, "__notes__", ()))
            ends.append("KeyboardInterrupt, and again" if again else "KeyboardInterrupt")
        except PeerFailure as error:
            ends.append(f"rank {error.rank}: {error.cause}")
    pipe.close()
    return ends


@pytest.mark.parametrize(
    ("place", "victim"), by_turns(PLACES, [0, 1], fast=[(place, row % 2) for row, place in enumerate(PLACES)], one_in=1)
)
def test_the_second_ctrl_c_in_the_middle_of_a_message_ends_the_group_by_name(place: str, victim: int) -> None:
    """It left half a step on the wires. In the next step gloo ended the process as a receive was too small for it."""
    found = on_processes(2, interrupted_twice, place, victim)
    assert found[victim].pop(0) == "KeyboardInterrupt"
    if place == "the exchange" and victim == 1:
        assert found[0].pop(0) == "True"  # rank 0 had heard all that it waited for
    for said in [*found[0], *found[1]]:
        assert said.startswith(f"rank {victim}: KeyboardInterrupt: Ctrl-C, again,")
        assert said.endswith("the group must be rebuilt")


def test_one_that_comes_while_the_group_is_given_up_does_not_keep_the_others_waiting() -> None:
    """The third of three within a millisecond left the call before any rank had heard of it: both waited 60 s."""
    done = []

    def give_up() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append(CTRL_C.state)

    def press_twice() -> None:
        with CTRL_C.around_step(give_up=give_up):
            signal.raise_signal(signal.SIGINT)  # is held
            signal.raise_signal(signal.SIGINT)  # is raised at once

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert done == [State.CUT]
    assert CTRL_C.state is State.OUTSIDE
