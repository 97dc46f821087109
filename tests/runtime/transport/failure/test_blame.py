"""Who is to blame, from what ranks say that they do."""

from __future__ import annotations

from penstock.runtime.transport import Channel
from penstock.runtime.transport.failure.blame import State, Waiting, different_calls, excused, judge

LINE = [Channel(0, 1, "F", 0, 1), Channel(1, 2, "F", 1, 2), Channel(1, 0, "B", 1, 0), Channel(2, 1, "B", 2, 1)]


def test_the_chain_of_waits_ends_at_the_culprit() -> None:
    def says(waiting: Waiting | None, call: str = "step()", step: int = 7) -> State:
        return State(waiting, "", None, step, call)

    waits = {rank: Waiting(rank + 1, None, -1, 0.0) for rank in range(3)}
    states = {rank: says(waiting) for rank, waiting in waits.items()}
    assert judge(0, waits[0], {**states, 3: says(None)}, 9).rank == 3
    assert "busy in its own code (rank 0 waits for rank 1" in judge(0, waits[0], {**states, 3: says(None)}, 9).cause
    assert "stopped or dead" in judge(0, waits[0], states, 9).cause
    assert judge(2, waits[2], {2: states[2]}, 9).rank == 3
    turned = Waiting(1, LINE[0], 4, 0.0)
    assert "deadlock for 9 s" in judge(0, waits[0], {**states, 3: says(turned)}, 9).cause
    apart = judge(0, waits[0], {**states, 3: says(turned, "evaluate()")}, 9)
    assert (apart.rank, "different calls" in apart.cause) == (3, True)
    for other in (says(turned, "evaluate()", step=8), says(None, "evaluate()"), says(turned, "")):
        assert "different calls" not in judge(0, waits[0], {**states, 3: other}, 9).cause


def test_who_is_excused_waits_in_a_chain_that_moves_on() -> None:
    """Rank 0 waits for 1, which waits for 2, which has moved a second ago; 3 waits for 4, which has not for long."""
    waits = {0: 1, 1: 2, 3: 4}
    still = {0: 30.0, 1: 30.0, 2: 1.0, 3: 30.0, 4: 30.0}
    states = {
        rank: State(Waiting(waits[rank], None, -1, 0.0) if rank in waits else None, "", None, seconds_unchanged=seconds)
        for rank, seconds in still.items()
    }
    assert excused(states, 9) == {0: 1.0, 1: 1.0}
    assert excused({rank: state for rank, state in states.items() if rank != 2}, 9) == {}  # it does not answer
    circle = {**states, 2: states[2]._replace(waiting=Waiting(0, None, -1, 0.0))}
    assert excused(circle, 9) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_the_odd_call_is_the_culprit_and_where_none_is_all_are_said() -> None:
    assert different_calls(["step()"] * 3) is None
    assert different_calls([]) is None
    for odd in range(3):
        found = different_calls([("evaluate()" if rank == odd else "step()") for rank in range(3)])
        assert found is not None
        assert found.rank == odd
    tie = different_calls(["step()", "save()", "step()", "save()"])
    assert tie is not None
    assert tie.rank == 1
    assert "(ranks 0 and 2 were in step(), ranks 1 and 3 were in save())" in tie.cause
