"""A rank that fails, dies, stops or leaves, where ranks are processes: all others know at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from deadlines import SOON, TIMEOUT
from faults.traps import (
    KILL,
    STOP,
    Boom,
    Trap,
    batch,
    boom,
    die,
    differing,
    plain_gradients,
    trap_of,
    trapped,
)
from processes import Ending, launch
from tiers import mostly_slow, slow_if
from torch import nn
from transports import ON_PROCESSES

import penstock
from penstock.errors import PeerFailure, UsageError

M = 4
RANKS = 4
Say = Callable[[Any], None]


STORES = [(transport, bool((turn + number) % 2)) for turn in range(2) for number, transport in enumerate(ON_PROCESSES)]


def by_turns(places: list[tuple[int, str]]) -> list[Any]:
    """Each place with every transport, the store on rank 0 or in a file; with half of these in the slow tests."""
    return [
        pytest.param(
            *place,
            transport,
            tcp,
            marks=slow_if(number % 2 == column),
            id=f"{place[0]}-{place[1]}-{transport}-{'store-on-rank-0' if tcp else 'file-store'}",
        )
        for number, place in enumerate(places)
        for column, (transport, tcp) in enumerate(STORES)
    ]


def pipeline(family: str = "1f1b", stages: int = RANKS, **options: Any) -> penstock.Pipeline:
    options = {"loss_fn": nn.functional.mse_loss, "microbatches": M, "timeout": TIMEOUT, "seed": 3, **options}
    return penstock.Pipeline(trapped(stages), schedule=family, **options)


def exact(pipe: penstock.Pipeline) -> str:
    """The next step, against the plain loop; "exact", or what is not."""
    for stage in pipe.deployment.ranks.modules():
        trap_of(pipe, stage).reset()
    left = [name for name, parameter in pipe.named_parameters() if parameter.grad is not None]
    x, y = batch()
    pipe.step(x, target=y)
    wrong = differing(pipe, plain_gradients(pipe.deployment.staged.stages, M))
    pipe.zero_grad()
    return f"left {left}, wrong {wrong}" if left or wrong else "exact"


def fail(pipe: penstock.Pipeline, size: int = 12) -> tuple[float, BaseException | None]:
    """When and how a step ended."""
    x, y = batch(size)
    try:
        pipe.step(x, target=y)
    except BaseException as error:
        return time.monotonic(), error
    return time.monotonic(), None


# -- an error on one rank


def raise_here_and_there(
    say: Say, family: str, stages: int, places: list[tuple[int, str, int]], transport: str = "shared"
) -> None:
    calls: list[int] = []
    wanted: list[int] = []

    def loss_fn(output: Any, target: Any) -> Any:
        calls.append(0)
        if wanted and len(calls) == wanted[0]:
            fault()
        return nn.functional.mse_loss(output, target)

    def fault() -> None:
        faults.append(time.monotonic())
        boom()

    with pipeline(family, stages, loss_fn=loss_fn, transport=transport) as pipe:
        say(exact(pipe))
        for stage, where, microbatch in places:
            faults: list[float] = []
            here = stage in pipe.deployment.ranks.modules()
            if here and where == "loss":
                calls.clear()
                wanted[:] = [microbatch + 1]
            elif here:
                trap_of(pipe, stage).set(where, microbatch, fault)
            told, error = fail(pipe)
            wanted.clear()
            assert isinstance(error, PeerFailure), error
            caused = type(error.__cause__).__name__ if error.__cause__ else None
            said = (error.rank, error.stage, error.action, error.microbatch, error.cause, caused)
            assert "in boom" in str(error.original_traceback)
            assert all(f"rank {rank}: " in str(error.report) for rank in range(RANKS)), error.report
            say((faults[0] if faults else None, told, said, exact(pipe)))
    dist.destroy_process_group()


def check_raised(endings: list[Ending], family: str, stages: int, places: list[tuple[int, str, int]]) -> None:
    from penstock.schedule import build

    schedule = build(family, RANKS, M, stages // RANKS)
    assert [ending.code for ending in endings] == [0] * RANKS, [ending.error[-2000:] for ending in endings]
    assert [ending.said[0] for ending in endings] == ["exact"] * RANKS
    for index, (stage, where, microbatch) in enumerate(places, 1):
        rows = [ending.said[index] for ending in endings]
        rank = schedule.placement.rank_of(stage)
        ops = {"forward": "F", "loss": "F", "backward": "BI"}[where]
        for number, (_, told, said, after) in enumerate(rows):
            assert said[0:2] == (rank, stage)
            assert said[2] in [f"{stage}{op}{microbatch}" for op in ops]
            assert said[3:5] == (microbatch, "Boom: the trap was sprung")
            assert said[5] == ("Boom" if number == rank else None)
            assert after == "exact"
            assert told - rows[rank][0] < SOON


@pytest.mark.parametrize("transport", mostly_slow(ON_PROCESSES, "shared"))
def test_an_error_on_any_rank_reaches_all_and_the_next_step_is_exact(transport: str) -> None:
    places = [(stage, where, 1) for stage in (0, 1, 3) for where in ("forward", "backward")] + [(3, "loss", 2)]
    check_raised(launch(RANKS, raise_here_and_there, "1f1b", 4, places, transport), "1f1b", 4, places)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "stages"), [("gpipe", 4), ("interleaved-1f1b", 8), ("zb-v", 8), ("dualpipe-v", 8)])
def test_so_it_is_under_other_schedules(family: str, stages: int) -> None:
    places = [
        (stage, where, microbatch)
        for stage in (0, 1, stages - 1)
        for where in ("forward", "backward")
        for microbatch in (0, M - 1)
    ]
    check_raised(launch(RANKS, raise_here_and_there, family, stages, places), family, stages, places)


def compute_on(say: Say) -> None:
    with pipeline("gpipe", microbatches=40) as pipe:
        assert fail(pipe, 40)[1] is None
        pipe.zero_grad()
        if 0 in pipe.deployment.ranks.modules():
            pipe.deployment.ranks.modules()[0].register_forward_hook(lambda *_: time.sleep(0.25))
        if 3 in pipe.deployment.ranks.modules():
            trap_of(pipe, 3).set("forward", 0, lambda: (say(("fault", time.monotonic())), boom()))
        told, error = fail(pipe, 40)
        assert isinstance(error, PeerFailure)
        say(("told", told, error.rank))
    dist.destroy_process_group()


def test_a_rank_that_computes_on_and_on_hears_of_the_failure_before_it_needs_a_message() -> None:
    """All forwards of rank 0 would take ten seconds, and only then would it wait for a message."""
    endings = launch(RANKS, compute_on)
    assert [ending.code for ending in endings] == [0] * RANKS
    fault = endings[3].said[0][1]
    assert [ending.said[-1][2] for ending in endings] == [3] * RANKS
    assert max(ending.said[-1][1] for ending in endings) - fault < SOON


def interrupt(say: Say) -> None:
    with pipeline() as pipe:
        say(exact(pipe))

        def ctrl_c() -> None:
            raise KeyboardInterrupt

        if dist.get_rank() == 2:
            trap_of(pipe, 2).set("backward", 1, ctrl_c)
        _, error = fail(pipe)
        say(type(error).__name__)
        say(exact(pipe))
    dist.destroy_process_group()


@pytest.mark.slow
def test_ctrl_c_on_one_rank_is_its_own_and_a_failure_to_the_others() -> None:
    endings = launch(RANKS, interrupt)
    assert [ending.said[1] for ending in endings] == ["PeerFailure", "PeerFailure", "KeyboardInterrupt", "PeerFailure"]
    assert [ending.said[2] for ending in endings] == ["exact"] * RANKS


# -- a rank that dies, stops or leaves


def lose(say: Say, victim: int, where: str, how: int, timeout: float, transport: str) -> None:
    rank = dist.get_rank()
    pipe = pipeline(timeout=timeout, transport=transport)
    say(exact(pipe))
    if rank == victim:
        if where == "between":
            die(say, how)()
        trap_of(pipe, victim).set(where, 1, die(say, how))
    told, error = fail(pipe)
    assert isinstance(error, PeerFailure), error
    say(("told", told, error.rank, str(error)))
    again, later = fail(pipe)
    assert isinstance(later, PeerFailure), later
    say(("later", again - told, later.rank, str(later)))
    pipe.close()
    raise error


def check_lost(endings: list[Ending], victim: int, within: float) -> float:
    """Everybody else names the victim in time, again at the next step, and ends with an error. Returns the longest."""
    kind, fault = endings[victim].said[1]
    assert kind == "fault"
    slowest = 0.0
    for rank, ending in enumerate(endings):
        if rank == victim:
            continue
        assert [entry[0] for entry in ending.said[1:]] == ["told", "later"], (rank, ending.error[-2000:])
        (_, told, who, text), (_, took, still, later) = ending.said[1:]
        assert (who, still) == (victim, victim), text
        assert f"rank {rank}: " in text
        assert "what each rank was doing" in text
        assert "the group must be rebuilt" in later
        assert took < SOON
        assert ending.code == 1
        assert "PeerFailure" in ending.error
        slowest = max(slowest, told - fault)
    assert slowest < within
    return slowest


@pytest.mark.parametrize("transport", mostly_slow(ON_PROCESSES, "distributed"))
def test_a_killed_rank_is_named_by_all_others_at_once(transport: str) -> None:
    endings = launch(RANKS, lose, 2, "forward", KILL, TIMEOUT, transport)
    check_lost(endings, 2, SOON)
    assert endings[2].code == -KILL


@pytest.mark.parametrize(
    ("victim", "where", "transport", "tcp"),
    by_turns([(0, "forward"), (1, "backward"), (3, "backward"), (1, "between")]),
)
def test_wherever_a_rank_is_killed(victim: int, where: str, tcp: bool, transport: str) -> None:
    check_lost(launch(RANKS, lose, victim, where, KILL, TIMEOUT, transport, tcp=tcp), victim, SOON)


@pytest.mark.parametrize(
    ("victim", "where", "transport", "tcp"), by_turns([(0, "forward"), (2, "backward"), (3, "between")])
)
def test_a_stopped_rank_is_named_at_the_timeout(victim: int, where: str, tcp: bool, transport: str) -> None:
    endings = launch(RANKS, lose, victim, where, STOP, 2.0, transport, tcp=tcp)
    assert endings[victim].code is None
    assert check_lost(endings, victim, 2.0 + SOON) > 1.5


def leave(say: Say, where: str) -> None:
    rank = dist.get_rank()
    pipe = pipeline()
    say(exact(pipe))
    if rank == 1:

        def goodbye() -> None:
            say(("fault", time.monotonic()))
            sys.exit(3)

        if where == "between":
            goodbye()
        trap_of(pipe, 1).set(where, 1, goodbye)
    told, error = fail(pipe)
    say(("told", told, getattr(error, "rank", None), str(error)))
    assert error is not None
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "between"])
def test_a_rank_that_leaves_is_missed_at_once(where: str) -> None:
    endings = launch(RANKS, leave, where)
    assert [ending.code for ending in endings] == [1, 3, 1, 1]
    fault = endings[1].said[1][1]
    for rank in (0, 2, 3):
        _, told, who, text = endings[rank].said[1]
        assert who == 1, text
        assert told - fault < SOON


def stay_away(say: Say) -> None:
    pipe = pipeline(timeout=2.0)
    say(exact(pipe))
    if dist.get_rank() == 1:
        time.sleep(8)  # busy with other things
    told, error = fail(pipe)
    assert isinstance(error, PeerFailure), error
    say((told, error.rank, str(error)))
    pipe.close()


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_the_step_is_named_at_the_timeout() -> None:
    endings = launch(RANKS, stay_away)
    for ending in endings:  # the late one too: its group is gone by then
        assert ending.said[1][1] == 1, ending.said
    assert max(endings[rank].said[1][0] for rank in (0, 2, 3)) < endings[1].said[1][0]
    assert "busy in its own code" in endings[0].said[1][2]


def die_before_the_first_step(say: Say, transport: str) -> None:
    pipe = pipeline(transport=transport)
    if dist.get_rank() == 0:  # it hosts the store, over which the others are about to meet
        die(say, KILL)()
    time.sleep(1)
    _, error = fail(pipe)
    assert isinstance(error, PeerFailure), error
    say((error.rank, error.cause))
    pipe.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_the_host_of_the_store_is_named_where_it_dies_before_the_ranks_have_met(transport: str) -> None:
    for ending in launch(RANKS, die_before_the_first_step, transport, tcp=True)[1:]:
        assert ending.said[0][0] == 0, ending.said
        assert "died or left" in ending.said[0][1]


def be_busy(say: Say, transport: str) -> None:
    pipe = pipeline("interleaved-1f1b", 8, timeout=2.0, transport=transport)
    say(exact(pipe))
    if dist.get_rank() == 1:
        trap_of(pipe, 5).set("forward", 1, lambda: time.sleep(8))
    _, error = fail(pipe)
    assert isinstance(error, PeerFailure), error
    say((error.rank, error.stage, error.action, error.microbatch, error.cause))
    pipe.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ON_PROCESSES)
def test_a_busy_rank_is_named_with_what_it_is_busy_with(transport: str) -> None:
    """Not with the message that another rank waits for, which may be of another stage and microbatch."""
    for ending in launch(RANKS, be_busy, transport):
        assert ending.said[1][:4] == (1, 5, "5F1", 1), ending.said
        assert "silent for 2 s, busy in its own code" in ending.said[1][4]


def evaluate_alone(say: Say) -> None:
    pipe = pipeline(timeout=2.0)
    say(exact(pipe))
    x, y = batch()
    call = pipe.evaluate if dist.get_rank() == 2 else pipe.step
    with pytest.raises(PeerFailure) as caught:
        call(x, target=y)
    say(str(caught.value))
    pipe.close()


@pytest.mark.slow
def test_a_rank_that_makes_another_call_is_told_so() -> None:
    for ending in launch(RANKS, evaluate_alone):
        assert "rank 2 failed: the ranks are in different calls" in ending.said[1], ending.said
        assert "rank 2: in evaluate(), waiting for" in ending.said[1]


# -- ranks that were given different things


def disagree(say: Say) -> None:
    odd = dist.get_rank() == 2
    wide = trapped(RANKS)
    wide[1] = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6), nn.Dropout(), Trap())
    cases: list[dict[str, Any]] = [
        {"microbatches": 8 if odd else M},
        {"schedule": "gpipe" if odd else "1f1b"},
        {"model": wide if odd else trapped(RANKS)},
        {"recompute": "always" if odd else "never"},
        {"model": trapped(RANKS - 1) if odd else trapped(RANKS)},  # one that this rank cannot even build
    ]
    for case in cases:
        begin = time.monotonic()
        given: dict[str, Any] = {"model": trapped(RANKS), "microbatches": M, **case}
        try:
            penstock.Pipeline(given.pop("model"), **given, timeout=TIMEOUT)
            say("built")
        except (UsageError, PeerFailure) as error:
            say((type(error).__name__, str(error), time.monotonic() - begin))
    pipe = pipeline()
    say(exact(pipe))
    pipe.close()
    dist.destroy_process_group()


def test_ranks_with_different_pipelines_are_refused_with_the_difference_named() -> None:
    endings = launch(RANKS, disagree)
    assert [ending.code for ending in endings] == [0] * RANKS, [ending.error[-2000:] for ending in endings]
    wanted = [
        "microbatches: rank 2 has 8, rank 0 has 4",
        "schedule: rank 2 has gpipe for 4 stages, rank 0 has 1f1b for 4 stages",
        "stage 1: rank 2 has 4 tensors with 97 numbers, rank 0 has 2 tensors with 42 numbers",
        "recompute: rank 2 has always, rank 0 has never",
        "3 stages cannot fill 4 ranks evenly",
    ]
    for rank, ending in enumerate(endings):
        assert ending.said[5] == "exact"
        for place, (kind, text, took) in enumerate(ending.said[:5]):
            assert wanted[place] in text
            assert kind == ("PeerFailure" if place == 4 and rank != 2 else "UsageError")
            assert took < SOON


def misfit(say: Say) -> None:
    rank = dist.get_rank()
    pipe = pipeline()
    x, y = batch()
    say(exact(pipe))

    def attempt(*args: Any, **kwargs: Any) -> None:
        begin = time.monotonic()
        try:
            pipe.step(*args, **kwargs)
            say(("nothing", "", 0.0))
        except Exception as error:
            say((type(error).__name__, str(error), time.monotonic() - begin))

    attempt(x[:8] if rank == 3 else x, target=y[:8] if rank == 3 else y)  # fails in the loss
    pipe.zero_grad()
    attempt(x[:8] if rank == 1 else x, target=y[:8] if rank == 1 else y)  # everything fits, and is wrong
    attempt(x[:2] if rank == 0 else x, target=y[:2] if rank == 0 else y)  # fewer rows than microbatches
    attempt(x, target=y, **({"mask": x} if rank == 2 else {}))
    say(exact(pipe))
    pipe.close()
    dist.destroy_process_group()


def test_a_rank_with_another_batch_is_refused_on_all() -> None:
    endings = launch(RANKS, misfit)
    assert [ending.code for ending in endings] == [0] * RANKS, [ending.error[-2000:] for ending in endings]
    sizes = "the ranks were given batches of different size (rank 0: 12 rows, "
    for rank, ending in enumerate(endings):
        first, loss, inside, few, mask, last = ending.said
        assert (first, last) == ("exact", "exact")
        assert loss[0] == "ModelError"
        assert f"{sizes}rank 1: 12 rows, rank 2: 12 rows, rank 3: 8 rows)" in loss[1]
        assert inside[0] == "ModelError"
        assert f"{sizes}rank 1: 8 rows, rank 2: 12 rows, rank 3: 12 rows)" in inside[1]
        assert few[0] == ("ModelError" if rank == 0 else "PeerFailure")
        assert mask[0] == ("ModelError" if rank == 2 else "PeerFailure")
        assert "no stage takes the keyword argument 'mask'" in mask[1]
        assert max(loss[2], inside[2], few[2], mask[2]) < SOON


def test_traps_do_what_they_say() -> None:
    """The tools of these tests, without any pipeline."""
    model = nn.Sequential(*trapped(2))
    x, _ = batch()
    trap = model[1][3]
    assert isinstance(trap, Trap)
    trap.set("backward", 1)
    model(x).sum().backward()
    with pytest.raises(Boom):
        model(x).sum().backward()
