"""`penstock show`: the drawing, its legend, and what is saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import PICTURE, run, swapped

from penstock.schedule import Schedule, build, lower, simulate


def test_show_draws_the_schedule_and_says_what_the_letters_mean() -> None:
    result = run("show", "1f1b", "--ranks", 2, "--microbatches", 2)
    assert result.exit_code == 0
    assert PICTURE in result.stdout
    assert "F forward; B backward; . idle" in result.stdout
    assert "placement 0 1; idle share 33.3 %" in result.stdout
    assert "peak activations by rank 2 1" in result.stdout


def test_show_says_which_slots_nobody_needs(tmp_path: Path) -> None:
    path = tmp_path / "gap.csv"
    path.write_text("0F0,,,0B0,,\n,,1F0,1B0\n")
    assert "\nno rank does anything in slot 1, which a run skips; placement 0 1;" in run("show", path).stdout
    assert "no rank" not in run("show", "1f1b").stdout


@pytest.mark.parametrize("name", ["ZBV", "zb_v", "ZBVZeroBubble", "ScheduleZBVZeroBubble"])
def test_a_family_answers_to_its_usual_names(name: str) -> None:
    assert run("show", name, "-r", 2, "-m", 2).stdout == run("show", "zb-v", "-r", 2, "-m", 2).stdout


def test_nothing_is_wrapped_or_coloured_in_a_pipe_but_width_wraps() -> None:
    assert "\x1b" not in run("show", "gpipe", "-r", 8, "-m", 64).stdout
    assert len(run("show", "gpipe", "-r", 2, "-m", 64).stdout.splitlines()[1]) > 400
    assert all(len(line) <= 60 for line in run("show", "gpipe", "-m", 32, "--width", 60).stdout.splitlines())


def test_show_lowered_has_transfers_and_what_is_saved_loads(tmp_path: Path) -> None:
    for name in ("program.csv", "program.json"):
        result = run("show", "1f1b", "-r", 2, "-m", 2, "--lowered", "--save", tmp_path / name)
        assert "0SEND_F0" in result.stdout
        assert Schedule.load(tmp_path / name).rows == lower(build("1f1b", 2, 2)).rows


def test_what_show_prints_as_json_is_a_file_that_loads(tmp_path: Path) -> None:
    printed = run("show", "zb-v", "-r", 3, "-m", 5, "--json").stdout
    (tmp_path / "printed.json").write_text(printed)
    assert Schedule.load(tmp_path / "printed.json") == build("zb-v", 3, 5)
    assert json.loads(printed)["idle_share"] == pytest.approx(simulate(build("zb-v", 3, 5)).bubble)


def test_a_bad_schedule_is_drawn_all_the_same_but_not_approved(tmp_path: Path) -> None:
    result = run("show", swapped(tmp_path / "bad.csv"))
    assert result.exit_code == 1
    assert "0SEND_F1" in result.stdout
    assert "must not be run" in result.stderr


def test_a_sharded_file_without_transfers_is_not_shown_as_if_it_were_lowered(sharded: Path) -> None:
    result = run("show", sharded, "--lowered")
    assert result.exit_code == 2
    assert "has reductions and shards but no transfers, and lowering starts from computes alone" in result.stderr
    assert run("show", sharded).exit_code == 0


def test_auto_is_shown_as_build_makes_it() -> None:
    result = run("show", "auto", "--ranks", 2, "--microbatches", 3, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    wanted = build("auto", 2, 3)
    assert document["placement"] == list(wanted.placement)
    assert document["rows"] == [[action and str(action) for action in row] for row in wanted.rows]
