"""Drawings and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import NotationError, ScheduleError, UsageError
from penstock.schedule import FAMILIES, Placement, Schedule, build, lower, parse, verify
from penstock.schedule.files.text import to_json


@pytest.mark.parametrize("width", [None, 40])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_drawing_is_read_back(name: str, width: int | None) -> None:
    schedule = build(name, 3, 5)
    assert Schedule.from_text(schedule.draw(width=width)) == schedule
    program = lower(schedule, reduce=True, window=2)
    read = Schedule.from_text(program.draw(width=width))
    assert read.compute() == program.compute()
    verify(read)


def test_text_may_carry_comments_and_labels() -> None:
    text = "# mine\nslot 0 1\nrank 0: 0F0 .\n\nrank 1| .   1F0\n"
    assert Schedule.from_text(text).rows == ((parse("0F0"), None), (None, parse("1F0")))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F0 0F1\n1F0 1X1", "row 2, column 2: '1X1' is not an action: expected"),
        ("0F0 (0F1;0F2)", r"row 1, column 2: '\(0F1;0F2\)OVERLAP_F_B' is not an action: .*one F and one of B, I, W"),
        ("0F0 (0F1;x)", "row 1, column 2: .*is not an action"),
        ("rank 1 1F0", "line 1 is for rank 1, but rank 0 has no line before it"),
        ("", "at least one row"),
    ],
)
def test_bad_text_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Schedule.from_text(text)


def test_every_bad_cell_of_a_text_is_named_at_once() -> None:
    with pytest.raises(NotationError) as caught:
        Schedule.from_text("0F0 0X1\n\n1F0 (1F1;z) 1Y")
    places = [fault.message.partition(":")[0] for fault in caught.value.faults]
    assert places == ["row 1, column 2", "row 3, column 2", "row 3, column 3"]


# -- files


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_files_give_back_an_equal_schedule(tmp_path: Path, name: str, suffix: str) -> None:
    schedule = build(name, 3, 4)
    for value in (schedule, lower(schedule), lower(schedule, reduce=True, window=2)):
        value.save(tmp_path / f"x{suffix}")
        loaded = Schedule.load(tmp_path / f"x{suffix}", ranks=3, microbatches=4)
        assert loaded == value
        if suffix == ".json" or not value.forward_only:  # there is nothing to reduce in a forward-only program
            assert loaded.passes == value.passes
        verify(loaded)


def test_json_keeps_what_csv_cannot_say(tmp_path: Path) -> None:
    schedule = build("1f1b", 3, 2, skips=[(0, 2)])
    schedule.save(tmp_path / "x.json")
    loaded = Schedule.load(tmp_path / "x.json")
    assert loaded == schedule
    assert loaded.name == "1f1b"
    assert loaded.topology.skips == ((0, 2),)
    pointless = schedule.replace([[], [None], []])
    pointless.save(tmp_path / "y.json")
    assert Schedule.load(tmp_path / "y.json", check=False) == pointless


def test_csv_is_one_row_a_rank_with_blank_cells_for_idle_slots(tmp_path: Path) -> None:
    build("1f1b", 2, 1).save(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_bytes() == b"0F0,,,0B0\r\n,1F0,1B0,\r\n"


def test_csv_of_spreadsheets_and_editors_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.CSV").write_bytes(b'\xef\xbb\xbf"0F0", ,0B0\n')
    assert Schedule.load(tmp_path / "x.CSV").rows == ((parse("0F0"), None, parse("0B0")),)


def test_a_blank_line_at_the_end_of_csv_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0F0,0B0\n\n \n")
    assert Schedule.load(tmp_path / "x.csv").ranks == 1


def test_which_stages_recompute_is_part_of_the_file(tmp_path: Path) -> None:
    schedule = build("zb-h1", 2, 3).replace(recompute=[0])
    schedule.save(tmp_path / "some.json")
    assert Schedule.load(tmp_path / "some.json") == schedule != build("zb-h1", 2, 3)
    with pytest.raises(UsageError, match=r"CSV holds actions alone, not that stages \[0\] recompute; save it as .json"):
        schedule.save(tmp_path / "some.csv")
    with pytest.raises(ScheduleError, match="the file is for recompute of stages"):
        Schedule.load(tmp_path / "some.json", recompute=[1])
    for odd in ([2], [True], ["0"], 1):
        with pytest.raises(UsageError, match="recompute"):
            schedule.replace(recompute=odd)


def test_csv_refuses_edges_that_no_row_tells(tmp_path: Path) -> None:
    schedule = build("1f1b", 3, 2, skips=[(0, 2)])
    with pytest.raises(UsageError, match=r"no transfer in the rows tells the edge 0 -> 2; save it as \.json"):
        schedule.save(tmp_path / "x.csv")
    assert not (tmp_path / "x.csv").exists()
    program = lower(schedule)  # its transfers name the edge
    program.save(tmp_path / "x.csv")
    assert Schedule.load(tmp_path / "x.csv") == program


def load(tmp_path: Path, text: str | bytes, suffix: str = ".csv", **facts: Any) -> Schedule:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Schedule.load(path, **facts)


@pytest.mark.parametrize(
    ("text", "facts", "why"),
    [
        ("0F0,0B0\n", {"ranks": 3}, r"2 faults:\n  rank 1: has no row in the file, which has 1\n  rank 2: has no row"),
        ("0F0,0B0\n1F0,1B0\n", {"ranks": 1}, "has 2 rows, for 1 ranks: 1 too many"),
        ("0F0,0B0\n2F0,2B0\n", {}, "stage 1 appears in no row; is the row of its rank missing"),
        ("0F0,0B0\n,,\n1F0,1B0\n", {}, "rank 1: the row is blank"),
        ("0F0,0B0\n\n1F0,1B0\n", {}, "rank 1: the row is blank"),
        ("", {}, "the file has no row"),
        ("0F0,0B0\n1F0,0F1,1B0\n", {}, "rank 1, position 1, 0F1: stage 0 lives on rank 0"),
        ("0F0,0B0\n1F0,9F0,1B0\n", {"placement": Placement([0, 1])}, "rank 1, position 1, 9F0: there is no stage 9"),
        ("0F0,0B0,0F7\n1F0,1B0\n", {"microbatches": 1}, "rank 0, position 2, 0F7: microbatch 7 is out of range"),
        ("0F0,0F7\n1F0,1F1\n2F0,2F1\n", {}, "0F7: microbatch 7 is out of range: there are 2, 0 to 1"),
        ("0F0,0B0\n1F0,1B0x\n", {}, "row 2, column 2: '1B0x' is not an action: expected"),
        ("0F0,0SEND_F0->5\n1F0\n", {}, "0SEND_F0->5: there is no stage 5"),
        ("0F0,0B0\n", {"placement": Placement([0, 1])}, "1 rows for a placement on 2 ranks"),
        (b"0F0,\xff\xfe", {}, "is not text in UTF-8"),
        ("0F0," + "x" * 200_000, {}, "not CSV: field larger"),
        ('0F0,"0F1\n1F0', {}, "row 1, column 2"),
    ],
)
def test_bad_csv_is_refused_with_what_is_wrong(
    tmp_path: Path, text: str | bytes, facts: dict[str, Any], why: str
) -> None:
    with pytest.raises(ScheduleError, match=why):
        load(tmp_path, text, **facts)


def test_without_the_check_a_misshaped_file_loads_for_verify_to_list_all(tmp_path: Path) -> None:
    schedule = load(tmp_path, "0F0,0F7,0B0\n1F0,1B0\n", microbatches=1, check=False)
    with pytest.raises(ScheduleError, match="0F7: microbatch 7 is out of range"):
        verify(schedule)


GOOD = json.loads(to_json(build("1f1b", 2, 1)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"penstock_schedule": 2}, '"penstock_schedule": 1 at its top'),
        ({"rows": None}, "'rows' is missing or wrong"),
        ({"rows": None, "edges": None}, "2 faults"),
        ({"microbatches": "4"}, "'microbatches' is missing or wrong"),
        ({"edges": [[0, 1, 2]]}, "not a complete schedule: ValueError"),
        ({"edges": [[1, 0]]}, "the edge 1 -> 0 does not fit"),
        (
            {"rows": [["0F0", 5], "1F0"]},
            r"row 1, column 2: 5 is not an action in quotes(?s:.*)row 2: '1F0' is not a list",
        ),
        ({"rows": [["0F0"], ["1F0", "1F0z"]]}, "row 2, column 2: '1F0z'"),
        ({"placement": [0, 2]}, "rank 1 owns no stage"),
        ({"microbatches": 0}, "at least 1"),
    ],
)
def test_bad_json_is_refused_with_what_is_wrong(tmp_path: Path, change: dict[str, object], why: str) -> None:
    with pytest.raises((ScheduleError, UsageError), match=why):
        load(tmp_path, json.dumps({**GOOD, **change}), ".json")


@pytest.mark.parametrize("text", ["", "0F0,0B0", "{", "[1]", "3"])
def test_what_is_not_a_json_schedule_at_all_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(NotationError, match=r"not JSON|a schedule in JSON has"):
        load(tmp_path, text, ".json")


@pytest.mark.parametrize("name", ["x.txt", "x", "x.csv.bak"])
def test_the_suffix_says_the_form(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"ends in \.csv or \.json"):
        build("1f1b", 2, 1).save(tmp_path / name)
    with pytest.raises(UsageError, match=r"ends in \.csv or \.json"):
        Schedule.load(tmp_path / name)


def test_rows_may_be_written_as_text() -> None:
    schedule = Schedule.from_text(["0F0 0F1 . 0B0 0B1", ". 1F0 1B0 (1F1;1B0)"], microbatches=2)
    cells = [["0F0", "0F1", ".", "0B0", "0B1"], [None, "1F0", " 1B0 ", "(1F1;1B0)OVERLAP_F_B"]]
    assert Schedule(cells) == schedule
    assert Schedule(["0F0 0F1 . 0B0 0B1", ". 1F0 1B0 (1F1;1B0)"]) == schedule
    assert Schedule([[parse("0F0"), "0F1", "", "0B0", parse("0B1")], schedule.rank(1)]) == schedule
    with pytest.raises(NotationError) as caught:
        Schedule([["0F0", "0B0x"], ["1F0", None, "1Q0"]])
    assert [str(fault)[:27] for fault in caught.value.faults] == [
        "row 1, column 2: '0B0x' is ",
        "row 2, column 3: '1Q0' is n",
    ]
