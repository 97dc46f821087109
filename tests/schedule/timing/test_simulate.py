"""Costs in, timeline out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import FAMILIES, Costs, Schedule, Timeline, build, lower, simulate, what_if


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in timeline.spans}


def test_each_compute_starts_when_its_rank_and_its_needs_are_there() -> None:
    timeline = simulate(build("1f1b", 2, 2), Costs(forward=1, input=2, weight=3))
    assert times(timeline) == {
        **{"0F0": (0, 1), "0F1": (1, 2), "0B0": (7, 12), "0B1": (13, 18)},
        **{"1F0": (1, 2), "1B0": (2, 7), "1F1": (7, 8), "1B1": (8, 13)},
    }
    assert timeline.makespan == 18
    assert timeline.bubble == pytest.approx(12 / 36)


def test_stages_may_cost_differently() -> None:
    timeline = simulate(build("gpipe", 2, 1), Costs(forward=[1, 10], input=[100, 1000], weight=0))
    assert times(timeline) == {"0F0": (0, 1), "1F0": (1, 11), "1B0": (11, 1011), "0B0": (1011, 1111)}


def test_a_hop_delays_the_reader_on_another_rank_only() -> None:
    timeline = simulate(build("zb-v", 2, 1), Costs(hop=10))
    at = times(timeline)
    assert at["1F0"][0] == at["0F0"][1] + 10
    assert at["2F0"][0] == at["1F0"][1]  # a hand-over on rank 1
    assert at["3F0"][0] == at["2F0"][1] + 10


def test_messages_of_one_link_queue_for_its_bandwidth() -> None:
    schedule = build("forward-only", 2, 3)
    at = times(simulate(schedule, Costs(forward=[1, 0], latency=5, bandwidth=2, bytes=8)))
    # made at 1, 2, 3; on the link 1-5, 5-9, 9-13; there 5 later
    assert [at[f"1F{microbatch}"][0] for microbatch in range(3)] == [10, 14, 18]


def test_the_two_directions_of_a_link_do_not_queue_for_each_other() -> None:
    order = Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    at = times(simulate(order, Costs(bandwidth=1, bytes=4)))
    assert at["1F0"] == (5.0, 6.0)
    assert at["1B0"] == (6.0, 8.0)
    assert at["0B0"][0] == 12  # 0F1's message is on the other direction from 5 to 9
    assert at["1F1"][0] == 9


def test_bytes_count_by_edge() -> None:
    schedule = build("forward-only", 3, 1, skips=[(0, 2)])
    at = times(simulate(schedule, Costs(bandwidth=1, bytes={(0, 1): 1, (1, 2): 1, (0, 2): 50})))
    assert at["2F0"][0] == 51


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_costs_what_its_schedule_costs(name: str) -> None:
    schedule, costs = build(name, 3, 5), Costs(forward=1, input=1.5, weight=0.5, hop=0.25)
    plain = simulate(schedule, costs)
    program = simulate(lower(schedule, reduce=True, window=2), costs)
    assert program.spans == plain.spans
    assert program.peak_activations == plain.peak_activations
    assert simulate(schedule.compute(), costs).spans == plain.spans


def test_pairs_are_priced_one_part_after_the_other() -> None:
    timeline = simulate(Schedule.from_text("0F0 (0F1;0B0) 0B1"), Costs(forward=1, input=2, weight=2))
    assert [str(span.action) for span in timeline.spans] == ["0F0", "0F1", "0B0", "0B1"]
    assert timeline.makespan == 10


def test_memory_is_taken_by_forwards_and_given_back_by_weight_gradients() -> None:
    order = Schedule.from_text("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0B2")
    timeline = simulate(order, Costs(activation=10, held=4))
    # 10 20 14 24 20 14 10 0
    assert timeline.peak_memory == (24.0,)
    assert timeline.peak_activations == (3,)
    assert simulate(order, Costs(activation=10)).peak_memory == (30,)
    assert simulate(build("1f1b", 2, 4), Costs(activation=[5, 7])).peak_memory == (10, 7)


def test_without_backward_nothing_is_held() -> None:
    timeline = simulate(build("forward-only", 2, 5), Costs(activation=3))
    assert timeline.peak_activations == (1, 1)
    assert timeline.peak_memory == (3, 3)


def test_what_cannot_run_is_an_error_not_a_shorter_timeline() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.from_text(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))
    with pytest.raises(ScheduleError, match="lives on rank"):
        simulate(Schedule.from_text(["0F0 1B0", "1F0 0B0"], placement=[0, 1]))


def test_jitter_is_seeded() -> None:
    schedule = build("1f1b", 3, 5)
    one = simulate(schedule, jitter=0.2, seed=7)
    assert one.spans == simulate(schedule, jitter=0.2, seed=7).spans
    assert one.spans != simulate(schedule, jitter=0.2, seed=8).spans
    assert simulate(schedule, jitter=0.0, seed=7) == simulate(schedule)
    with pytest.raises(UsageError, match="relative spread of 0 or more"):
        simulate(schedule, jitter=-0.1)


def test_what_if_gives_mean_and_spread_of_many_draws() -> None:
    schedule = build("1f1b", 4, 8)
    spread = what_if(schedule, jitter=0.2, draws=50, seed=1)
    assert spread == what_if(schedule, jitter=0.2, draws=50, seed=1)
    assert spread != what_if(schedule, jitter=0.2, draws=50, seed=2)
    assert len(set(spread.makespans)) == 50
    assert spread.low < spread.mean < spread.high
    assert spread.mean > simulate(schedule).makespan  # the slowest rank decides
    assert 0 < spread.deviation < 0.1 * spread.mean
    still = what_if(schedule, jitter=0, draws=3)
    assert (still.mean, still.deviation) == (simulate(schedule).makespan, 0)
    assert what_if(schedule, jitter=0.1, draws=1).deviation == 0
    with pytest.raises(UsageError, match="draws must be a whole number of at least 1, got 0"):
        what_if(schedule, jitter=0.1, draws=0)


PAIRS = Schedule.from_text(["0F0 0F1 (0F2;0B0) 0B1 0B2"])


def test_a_pair_takes_its_share_of_the_sum_of_its_parts() -> None:
    costs = Costs(forward=2, input=1, weight=2)
    assert simulate(PAIRS, costs).makespan == 15
    timeline = simulate(PAIRS, replace(costs, overlap=0.6))
    assert timeline.makespan == 13
    assert [(str(span.action), span.start, span.end) for span in timeline.spans][2] == ("(0F2;0B0)OVERLAP_F_B", 4, 7)
    assert simulate(PAIRS, replace(costs, overlap={(0, 0): 0.6})).spans == timeline.spans
    assert simulate(PAIRS, replace(costs, overlap={})).makespan == 15


def test_a_pair_waits_for_what_both_parts_need_and_then_makes_all_at_its_end() -> None:
    schedule = Schedule.from_text(["0F0 (0F1;0B0) 0B1", "1F0 1B0 1F1 1B1"])
    timeline = simulate(schedule, Costs(forward=1, input=2, weight=2, overlap=1.0))
    spans = {str(span.action): (span.start, span.end) for span in timeline.spans}
    assert spans["(0F1;0B0)OVERLAP_F_B"] == (6, 11)  # 1B0 ends at 6: 0F1 alone could have started at 1
    assert spans["1F1"] == (11, 12)


def test_a_pair_that_is_not_named_runs_one_half_after_the_other_and_sends_what_is_made() -> None:
    schedule = build("interleaved-1f1b", 2, 2, 1, overlap_b_f=True)
    costs = Costs(links=[[1, 2], [3, 2]])
    plain = simulate(schedule, costs)
    assert plain.makespan == 14
    for other in ({}, {(0, 1): 0.5}):  # the only pair is of stage 1 with itself
        assert simulate(schedule, replace(costs, overlap=other)).spans == plain.spans
    assert simulate(schedule, replace(costs, overlap={(1, 1): 1.0})).makespan == 16  # sent when both halves are done


def test_halves_that_run_together_hold_their_memory_together() -> None:
    schedule = build("interleaved-1f1b", 4, 16, 1, overlap_b_f=True)
    alone, paired = (simulate(schedule, Costs(overlap=overlap)) for overlap in (None, 0.6))
    assert alone.peak_memory == alone.peak_activations == (4, 3, 2, 1)  # a backward gives back, then the forward takes
    assert paired.peak_memory == paired.peak_activations == (5, 4, 3, 2)
    one = simulate(schedule, Costs(overlap={(2, 2): 0.6}))
    assert one.peak_memory == (4, 3, 3, 1)
    again = simulate(schedule.replace(recompute={0}), Costs(kept=0.25, overlap=0.6))  # 4 kept, 1 more and 3/4 again
    assert again.peak_memory[0] == 2


def test_pairs_make_dualpipe_v_worth_what_they_save() -> None:
    schedule = build("dualpipe-v", 4, 16)
    alone, paired = (simulate(schedule, Costs(hop=0.1, overlap=overlap)) for overlap in (None, 0.6))
    assert paired.makespan < 0.8 * alone.makespan
    assert sum(paired.busy) < sum(alone.busy)
    assert paired.peak_activations == alone.peak_activations


@pytest.mark.parametrize(
    ("overlap", "why"),
    [("half", "takes a share"), (-0.5, "0 or more"), ({3: 0.5}, "names pairs"), ({(0, 1): math.inf}, "finite")],
)
def test_an_overlap_is_a_share_or_one_by_pair_of_stages(overlap: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Costs(overlap=overlap)
