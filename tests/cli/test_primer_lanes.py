"""Who sends what to whom, drawn in lanes."""

from __future__ import annotations

from penstock.cli.primer import LaneEvent, Lanes, read_event

EVENTS = [
    LaneEvent("two ranks speak"),
    LaneEvent("holds [3, 1]", 0),
    LaneEvent("[3, 1]", 0, (1, 3)),
    LaneEvent("back", 3, (1,)),
    LaneEvent("to both sides", 2, (0, 3)),
    LaneEvent("done"),
]
PICTURE = """\
two ranks speak
0     1     2     3
o     |     |     |     holds [3, 1]
o---->|-----+---->|     [3, 1]
|     |<----+-----o     back
|<----+-----o---->|     to both sides
done"""


def test_who_sends_what_to_whom_is_drawn_in_lanes() -> None:
    assert "\n".join(line.plain.rstrip() for line in Lanes(4, plain=True).draw(EVENTS)) == PICTURE
    pretty = [line.plain for line in Lanes(4).draw(EVENTS)]
    assert pretty[3] == "●────▶│─────┼────▶│     [3, 1]"


def test_a_narrow_terminal_folds_the_words_and_keeps_the_lanes() -> None:
    lines = [line.plain for line in Lanes(2, width=40, plain=True).draw([LaneEvent("many words " * 5, 0, (1,))])]
    assert lines[1].startswith("o---->|     many words")
    assert lines[2].startswith("|     |     ")
    assert all(len(line) <= 40 for line in lines)


def test_many_ranks_get_narrower_lanes() -> None:
    lines = [
        line.plain
        for line in Lanes(12, width=80, plain=True).draw([LaneEvent("x", 10, (11,)), LaneEvent("y", 11, (9,))])
    ]
    assert lines[0].split() == [str(rank) for rank in range(12)]
    assert lines[1].startswith("|   " * 10 + "o-->|   x")
    assert lines[2].startswith("|   " * 9 + "|<--+---o   y")


def test_printed_lines_are_read_as_what_they_say() -> None:
    assert read_event("rank 0 -> rank 1, 12: [3, 1]: x") == LaneEvent("[3, 1]: x", 0, (1, 12))
    assert read_event("rank 10: has rank 3: x") == LaneEvent("has rank 3: x", 10)
    for other in ("rank 0 -> 1: x", "check: rank 0", "", "rank one: x"):
        assert read_event(other) == LaneEvent(other)
