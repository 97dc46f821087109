"""Messages are priced as they are sent: one for each value and link."""

from __future__ import annotations

import pytest

from penstock.schedule import Costs, Schedule, Timeline, Topology, lower, simulate

# stage 0 on rank 0 feeds stages 1 and 2, both on rank 1
SHARED = Schedule.from_text(
    "0F0 0B0\n1F0 2F0 2B0 1B0", placement=[0, 1, 1], topology=Topology(3, [(0, 1), (0, 2), (1, 2)])
)


def starts(timeline: Timeline) -> dict[str, float]:
    return {str(span.action): span.start for span in timeline.spans}


def test_a_shared_link_carries_the_largest_output_and_one_gradient() -> None:
    program = lower(SHARED)
    assert [str(action) for action in program.rows[1] if action and "SEND" in str(action)] == ["1SEND_B0"]
    times = starts(simulate(program, Costs(bandwidth=1.0, bytes={(0, 1): 2.0, (0, 2): 5.0, (1, 2): 1.0})))
    assert times["1F0"] == 1 + 5  # the value goes once, as large as its largest reader says
    assert times["1B0"] == 6 + 1 + 1 + 2
    assert times["0B0"] == times["1B0"] + 2 + 5  # one message, after the last of the two gradients


def test_a_queue_holds_one_message_of_a_shared_link() -> None:
    half = simulate(SHARED, Costs(bandwidth=1.0, bytes=3.0))
    assert starts(half)["0B0"] == starts(half)["1B0"] + 2 + 3
    assert str(half.critical_path[-1].action) == "0B0"
    assert str(half.critical_path[-2].action) in ("1B0", "2B0")


def test_a_stage_that_feeds_one_reader_is_priced_as_before() -> None:
    chain = Schedule.from_text("0F0 0B0\n1F0 1B0")
    assert simulate(chain, Costs(latency=0.5, bandwidth=2.0, bytes=3.0)).makespan == pytest.approx(6 + 2 * (1.5 + 0.5))
