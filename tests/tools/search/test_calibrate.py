"""Costs from a timeline: what went into a simulation comes out of it again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.errors import UsageError
from penstock.schedule import FAMILIES, Costs, Schedule, Span, Timeline, build, parse, simulate
from penstock.schedule.timing.timeline import Wall
from penstock.tools.search.calibrate import fitted

SPLIT = [name for name in FAMILIES if any(part.op.name == "I" for _, _, part in build(name, 2, 2).parts())]


@pytest.mark.parametrize("name", SPLIT)
def test_split_schedules_give_their_costs_back(name: str) -> None:
    schedule = build(name, 3, 8)
    stages = range(schedule.stages)
    costs = Costs(
        forward=[1 + 0.1 * stage for stage in stages],
        input=[1.2 + 0.1 * stage for stage in stages],
        weight=[0.6 + 0.05 * stage for stage in stages],
        hop=0.25,
    )
    found = Costs.from_timeline(simulate(schedule, costs))
    for field in ("forward", "input", "weight"):
        assert getattr(found, field) == pytest.approx(getattr(costs, field)), field
    assert found.hop == pytest.approx(0.25)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_is_predicted_by_its_own_costs(name: str) -> None:
    timeline = simulate(build(name, 4, 9), Costs(forward=1, input=1.1, weight=0.9, hop=0.05))
    again = simulate(timeline.schedule, Costs.from_timeline(timeline))
    assert again.makespan == pytest.approx(timeline.makespan)


def test_full_backwards_are_halved() -> None:
    found = Costs.from_timeline(simulate(build("1f1b", 2, 4), Costs(forward=1, input=1, weight=3)))
    assert found.input == pytest.approx((2, 2))
    assert found.weight == pytest.approx((2, 2))


def test_one_disturbed_action_does_not_count() -> None:
    timeline = simulate(build("1f1b", 2, 9))
    spans = list(timeline.spans)
    spans[3] = spans[3]._replace(end=spans[3].end + 0.5)
    assert Costs.from_timeline(Timeline(timeline.schedule, tuple(spans))).forward == pytest.approx((1, 1))


def test_the_time_until_the_next_action_belongs_to_the_one_before() -> None:
    """A rank that sends for 0.5 after each forward can start the next one only then."""
    schedule = Schedule.from_text(["0F0 0F1 0F2"])
    spans = tuple(Span(0, parse(f"0F{number}"), 1.5 * number, 1.5 * number + 1) for number in range(3))
    assert Costs.from_timeline(Timeline(schedule, spans)).forward == (1.5,)


def test_a_message_nobody_waited_for_does_not_set_the_hop() -> None:
    """Rank 1 turns to 1F1 long after 0F1 was made: the gap says how busy rank 1 was."""
    schedule = Schedule.from_text(["0F0 0F1", "1F0 1F1"])
    spans = (
        Span(0, parse("0F0"), 0.0, 1.0),
        Span(0, parse("0F1"), 1.0, 2.0),
        Span(1, parse("1F0"), 1.5, 9.0, 1.5),
        Span(1, parse("1F1"), 9.01, 10.0, 0.01),
    )
    walls = (Wall(0.0, 2.0, 10.0), Wall(0.0, 10.0, 10.0))
    assert Costs.from_timeline(Timeline(schedule, spans, walls=walls)).hop == 0.5
    patient = (*spans[:2], Span(1, parse("1F0"), 3.0, 9.0, 0.0), Span(1, parse("1F1"), 9.0, 10.0))
    assert Costs.from_timeline(Timeline(schedule, patient, walls=walls)).hop == 2.0  # an upper bound


def test_half_a_recording_is_refused() -> None:
    schedule = Schedule.from_text(["0F0", "1F0"])
    with pytest.raises(UsageError, match="no forward of stage 1; record a whole step"):
        Costs.from_timeline(Timeline(schedule, (Span(0, parse("0F0"), 0, 1),)))


def test_another_number_of_stages_is_an_even_cut_of_the_same_model() -> None:
    costs = Costs(forward=[1, 3], input=[2, 2], weight=[1, 1], hop=0.5)
    assert fitted(costs, build("1f1b", 2, 4), 2) is costs
    even = fitted(costs, build("zb-v", 4, 4), 2)
    assert (even.forward, even.input, even.weight, even.hop) == (0.5, 0.5, 0.25, 0.5)


def test_what_pairs_took_is_measured_beside_what_their_parts_take_alone() -> None:
    """A run of pairs that a handler overlapped: the costs that it tells repeat it."""
    schedule = build("dualpipe-v", 2, 8)
    stated = Costs(
        forward=[3, 4, 5, 6],
        input=[4, 5, 3, 4],
        weight=[2, 3, 1, 2],
        hop=0.25,
        overlap={(0, 3): 0.5, (1, 2): 0.6, (2, 1): 0.7, (3, 0): 0.8},
    )
    timeline = simulate(schedule, stated)
    found = Costs.from_timeline(timeline)
    assert isinstance(found.overlap, Mapping)
    assert dict(found.overlap) == pytest.approx(dict(stated.overlap))  # type: ignore[arg-type]
    assert found.by_op(4)[0] == pytest.approx(stated.by_op(4)[0])
    assert simulate(schedule, found).makespan == pytest.approx(timeline.makespan)
    assert fitted(found, build("dualpipe-v", 4, 8), stages=4).overlap == pytest.approx(0.65)


def test_without_pairs_nothing_is_said_of_them() -> None:
    assert Costs.from_timeline(simulate(build("zb-v", 2, 4))).overlap is None
