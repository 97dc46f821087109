"""A schedule as a picture: a row for each rank, a column for each time slot."""

from __future__ import annotations

import pytest

from penstock.schedule import Schedule, build, lower

PICTURES = {
    ("gpipe", 2, 2, 1): """\
slot   0   1   2   3   4   5
rank 0 0F0 0F1 .   .   0B0 0B1
rank 1 .   1F0 1F1 1B0 1B1 .""",
    ("1f1b", 3, 3, 1): """\
slot   0   1   2   3   4   5   6   7   8   9
rank 0 0F0 0F1 0F2 .   .   0B0 .   0B1 .   0B2
rank 1 .   1F0 1F1 .   1B0 1F2 1B1 .   1B2 .
rank 2 .   .   2F0 2B0 2F1 2B1 2F2 2B2 .   .""",
    ("1f1b", 2, 1, 2): """\
slot   0   1   2   3   4   5   6   7
rank 0 0F0 1F0 .   .   .   .   1B0 0B0
rank 1 .   .   2F0 3F0 3B0 2B0 .   .""",
    ("looped-bfs", 2, 2, 2): """\
slot   0   1   2   3   4   5   6   7   8   9
rank 0 0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0
rank 1 .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 .""",
    ("interleaved-1f1b", 2, 2, 2): """\
slot   0   1   2   3   4   5   6   7   8   9
rank 0 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
rank 1 .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .""",
    ("forward-only", 2, 2, 2): """\
slot   0   1   2   3   4
rank 0 0F0 0F1 2F0 2F1 .
rank 1 .   1F0 1F1 3F0 3F1""",
}


@pytest.mark.parametrize("case", PICTURES, ids=lambda case: "-".join(map(str, case)))
def test_drawings(case: tuple[str, int, int, int]) -> None:
    assert build(*case).draw() == PICTURES[case]


def test_a_program_with_few_slots_and_many_ranks_is_drawn_too() -> None:
    picture = build("forward-only", 4, 1).draw()
    assert picture.splitlines()[-1] == "rank 3 .   .   .   3F0"
    assert Schedule.from_text(["0F0", "1F0", "2F0"]).draw() == "slot   0\nrank 0 0F0\nrank 1 1F0\nrank 2 2F0"


def test_labels_are_as_wide_as_the_widest_rank() -> None:
    lines = build("forward-only", 11, 1).draw().splitlines()
    assert lines[0].startswith("slot    0 ")
    assert lines[1].startswith("rank 0  0F0")
    assert lines[11].startswith("rank 10 .")


def test_rows_of_unequal_length_are_idle_at_the_end() -> None:
    assert Schedule.from_text(["0F0 0F1", "1F0"], microbatches=2).draw().splitlines()[2] == "rank 1 1F0 ."


def test_wrapped_drawings_stay_within_the_width() -> None:
    assert lower(build("1f1b", 2, 2)).draw(width=50) == (
        "slot   0        1        2   3        4        5\n"
        "rank 0 0F0      0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0\n"
        "rank 1 1RECV_F0 1RECV_F1 1F0 1B0      1SEND_B0 1F1\n"
        "\n"
        "slot   6        7\n"
        "rank 0 0RECV_B1 0B1\n"
        "rank 1 1B1      1SEND_B1"
    )
    for width in (20, 44, 60):
        picture = lower(build("zb-v", 3, 4)).draw(width=width)
        assert max(map(len, picture.splitlines())) <= width
        assert picture.count("rank 0") > 1


def test_colours_change_nothing_but_the_colour() -> None:
    schedule = build("dualpipe-v", 2, 5)
    painted = schedule.draw(color=True)
    plain = painted
    for code in ("0", "32", "33", "34", "35", "36"):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain != painted
    assert plain == schedule.draw()
    assert "\x1b[34m1F0" in painted
    assert build("1f1b", 2, 1).draw(color=True) == (
        "slot   0   1   2   3\n"
        "rank 0 \x1b[34m0F0\x1b[0m .   .   \x1b[32m0B0\x1b[0m\n"
        "rank 1 .   \x1b[34m1F0\x1b[0m \x1b[32m1B0\x1b[0m ."
    )
