"""A rehearsal runs the real runtime: what it says is what the simulator, the program and a plain loop say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from rehearsal_cases import COSTS, parts_of
from tiers import by_turns

import penstock
from penstock.errors import PeerFailure, UsageError
from penstock.runtime.messages import plain
from penstock.schedule import FAMILIES, Costs, Schedule, Topology, build, lower, simulate
from penstock.tools.rehearsal.rehearse import rehearse


@pytest.mark.parametrize(
    ("family", "ranks", "microbatches"),
    by_turns(FAMILIES, [(1, 3), (2, 4), (4, 9)], fast=[("1f1b", 1, 3), ("zb-v", 2, 4), ("interleaved-1f1b", 4, 9)]),
)
def test_it_takes_the_simulated_time_and_follows_the_program(family: str, ranks: int, microbatches: int) -> None:
    schedule = build(family, ranks, microbatches)
    for costs in COSTS:
        found = rehearse(schedule, costs, steps=2)
        assert found.is_exact
        assert found.completed == (2,) * ranks
        assert not found.hung
        for rank in range(ranks):
            assert list(found.order[rank]) == 2 * parts_of(found.program, rank)
        assert found.makespan == pytest.approx(simulate(schedule, costs).makespan, abs=1e-9)


def test_overlapped_pairs_take_the_simulated_time() -> None:
    schedule, costs = build("dualpipe-v", 4, 9), Costs(forward=0.3, input=0.2, weight=0.1, hop=0.05, overlap=0.6)
    for priced in (costs, replace(costs, overlap={(0, 7): 0.5, (6, 1): 0.7})):  # pairs that are not named: in turn
        found = rehearse(schedule, priced)
        assert found.is_exact
        assert found.makespan == pytest.approx(simulate(schedule, priced).makespan, abs=1e-9)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward=(0.1, 0.3, 0.2, 0.4), input=0.2, weight=0.1, hop=0.01),
        Costs(sizes=(1, 2, 0.5, 1, 1, 3), latency=0.1, bandwidth=2, bytes=1),
        Costs(links=[[0, 0.5, 0.1, 0.1], [0.2, 0, 0.3, 0.1], [0.1, 0.4, 0, 0.7], [0.1, 0.1, 0.2, 0]], latency=0.01),
    ],
)
@pytest.mark.parametrize("family", ["1f1b", "zb-h1"])
def test_uneven_costs_take_the_simulated_time(family: str, costs: Costs) -> None:
    schedule = build(family, 4, 6)
    assert rehearse(schedule, costs).makespan == pytest.approx(simulate(schedule, costs).makespan, abs=1e-9)


def test_values_that_skip_stages_and_stages_that_recompute() -> None:
    plain = build("1f1b", 4, 5)
    schedule = Schedule(
        plain.rows,
        placement=plain.placement,
        topology=Topology.chain(4, [(0, 3), (1, 3)]),
        recompute=[1, 2],
    )
    found = rehearse(schedule, COSTS[1])
    assert found.is_exact
    assert found.makespan == pytest.approx(simulate(schedule, COSTS[1]).makespan, abs=1e-9)


def test_a_seed_is_one_interleaving() -> None:
    schedule = build("zb-v", 3, 6)

    def run(seed: int) -> tuple[float, Sequence[tuple[int, float, str]]]:
        found = rehearse(schedule, COSTS[1], seed=seed, jitter=0.3, faults=["die 1 at 2"], timeout=10)
        return found.makespan, [(each.rank, each.time, str(each.error)) for each in found.notices]

    assert run(3) == run(3)
    assert len({run(seed)[0] for seed in range(4)}) == 4


def test_a_rank_that_dies_is_named_by_all_others_within_seconds() -> None:
    found = rehearse(build("1f1b", 4, 8), COSTS[3], steps=50, faults=["die 2 at 1.5"])
    assert [each.rank for each in found.notices] != []
    assert {each.rank for each in found.notices} == {0, 1, 3}
    assert {each.named for each in found.notices} == {2}
    assert max(each.time for each in found.notices) < 1.5 + 5


def test_a_failed_computation_leaves_the_links_whole() -> None:
    found = rehearse(build("zb-h1", 3, 6), steps=3, faults=["fail 1 at 1I2 in step 1"])
    assert found.completed == (2, 2, 2)
    assert found.is_exact
    assert {each.step for each in found.notices} == {1}
    for notice in found.notices:
        assert isinstance(notice.error, PeerFailure)
        assert (notice.named, notice.error.action, notice.error.microbatch) == (1, "1I2", 2)


def test_a_message_that_was_lost_is_said_to_be_lost() -> None:
    """Its sender waits too, for something that never comes either: a cycle, in which only one message was sent."""
    found = rehearse(build("gpipe", 3, 1), COSTS[1], timeout=10, faults=["lose 2SEND_B0"])
    assert found.named == (2,)
    assert "it sent a message that has not come for 10 s" in str(found.notices[0].error)


def test_a_chain_of_waits_that_moves_on_does_not_excuse_another_that_stands_still() -> None:
    """Rank 0 waits for rank 1, which computes for two minutes, one forward after the other: its alarms are called off.

    Meanwhile rank 3 waits for rank 2, which stands still from second 20 on. Each alarm that was called off used to
    excuse rank 3 too, so that nobody was named before second 130.
    """
    costs = Costs(forward=(0.1, 5, 0.1, 0.1), input=0.1, weight=0.1)
    found = rehearse(build("gpipe", 4, 24), costs, timeout=10, faults=["stall 2 at 2F3"])
    assert found.named == (2,)
    assert {each.rank for each in found.notices} == {0, 1, 3}
    assert max(each.time for each in found.notices) < 20 + 10 + 5 + 5  # the timeout, the verdict, a forward of rank 1


def test_what_ranks_say_at_the_end_of_a_step_is_decoded_once_and_not_by_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one process, a thousand ranks that each decode the reports of all others are a million decodings per step."""
    decoded = []

    def counted(content: bytes, loads: Callable[[bytes], object] = plain.loads) -> object:
        decoded.append(content)
        return loads(content)

    monkeypatch.setattr(plain, "loads", counted)
    ranks = 24
    assert rehearse(build("1f1b", ranks, 2), COSTS[3], steps=2).completed == (2,) * ranks
    assert len(decoded) <= 2 * (2 * ranks + 1)  # per step: each report as it comes, what is in it, the answer to all


def test_a_program_and_a_public_name() -> None:
    program = lower(build("1f1b", 2, 4))
    assert penstock.rehearse(program).program is program


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"costs": 3}, "costs must be a Costs"),
        ({"steps": 0}, "steps"),
        ({"seed": "x"}, "seed is a whole number"),
        ({"timeout": 0}, "timeout is a number of seconds above 0"),
        ({"timeout": 1e-9}, "an answer takes 0.00011 s here, so that .* pass at least 0.0011"),  # it ran for hours
        ({"jitter": -1}, "jitter is a relative spread"),
        ({"store_host": 2}, "there are ranks 0 to 1"),
        ({"faults": "die 1 at 3"}, "faults is a list"),
        ({"faults": ["die 2 at 3"]}, "there is no rank 2"),
        ({"faults": ["die 0 at 1F0"]}, "1F0 is no computation of rank 0"),
        ({"faults": ["lose 0SEND_F9"]}, "sends no such message"),
        ({"faults": ["fail 1 at 1F0 in step 1"]}, "there is no step 1"),
        ({"faults": [7]}, "faults are texts"),
        ({"faults": ["die 1 at 3 in step 1"], "steps": 2}, "a time counts from the start of training"),
        ({"faults": ["lose 0SEND_F1", "duplicate 0SEND_F1"]}, "are about the same message"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        rehearse(build("1f1b", 2, 4), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("faults", "as_if"),
    [
        (["stop 1 at 3.5 for 11", "stop 1 at 4.5 for 1"], ["stop 1 at 3.5 for 11"]),
        (["stop 1 at 3.5", "stop 1 at 4.5 for 1"], ["stop 1 at 3.5"]),
        (["slow 1 at 1F2 by 2", "stall 1 at 1F2 for 30"], ["stall 1 at 1F2 for 30", "slow 1 at 1F2 by 2"]),
    ],
)
def test_faults_of_one_rank_add_up(faults: list[str], as_if: list[str]) -> None:
    """Once the stop that ended first let the rank go, even one that was to stop for ever, and of two faults at one
    action only the second happened."""
    found, alike = (rehearse(build("1f1b", 4, 8), faults=each) for each in (faults, as_if))
    assert set(map(str, found.struck)) == set(faults)
    assert (found.makespan, found.order, found.named) == (alike.makespan, alike.order, alike.named)


def test_reductions_are_not_rehearsed() -> None:
    with pytest.raises(UsageError, match="replicas and shards are not rehearsed"):
        rehearse(lower(build("1f1b", 2, 4), reduce=True))
