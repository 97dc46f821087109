"""What each command prints and returns, called in this process."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import app
from penstock.schedule import FAMILIES, Schedule, build, lower, simulate, verify

PICTURE = """\
slot   0   1   2   3   4   5
rank 0 0F0 0F1 .   0B0 .   0B1
rank 1 .   1F0 1B0 1F1 1B1 .
"""


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def swapped(path: Path) -> Path:
    """A program in which rank 0 sends its first two outputs the wrong way round."""
    program = lower(build("gpipe", ranks=2, microbatches=3))
    row = list(program.rank(0))
    sends = [position for position, action in enumerate(row) if str(action).startswith("0SEND_F")]
    row[sends[0]], row[sends[1]] = row[sends[1]], row[sends[0]]
    program.replace([row, *program.rows[1:]]).save(path)
    return path


# show


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


# verify


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_proved(name: str) -> None:
    result = run("verify", name, "-r", 3, "-m", 4)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"proved: {name}: 3 ranks")
    assert "no deadlock" in result.stdout


def test_a_file_of_computes_is_proved_with_its_transfers_added(tmp_path: Path) -> None:
    build("1f1b", 2, 2).save(tmp_path / "computes.csv")
    result = run("verify", tmp_path / "computes.csv", "--ranks", 2, "--microbatches", 2, "--stages-per-rank", 1)
    assert result.exit_code == 0
    assert "8 computes" in result.stdout
    assert "8 transfers added here: 4 messages" in result.stdout
    document = json.loads(run("verify", tmp_path / "computes.csv", "--json").stdout)
    certificate = document.pop("certificate")
    assert certificate["digest"] == verify(lower(build("1f1b", 2, 2))).digest
    assert document == {
        "proved": True,
        "name": "",
        "ranks": 2,
        "stages": 2,
        "microbatches": 2,
        "computes": 8,
        "transfers": 8,
        "transfers_added": True,
        "sharding": 0,
        "messages": 4,
        "faults": [],
    }


def test_a_swapped_send_is_named_with_rank_position_and_action(tmp_path: Path) -> None:
    path = swapped(tmp_path / "bad.csv")
    result = run("verify", path)
    assert result.exit_code == 1
    assert result.stdout.startswith("bad.csv: 2 ranks, 2 stages, 3 microbatches: ")
    assert "rank 0, position 1, 0SEND_F1: stands before 0F1, which it needs" in result.stdout
    document = json.loads(run("verify", path, "--json").stdout)
    assert document["proved"] is False
    assert document["faults"][0] == {
        "rank": 0,
        "position": 1,
        "action": "0SEND_F1",
        "message": "stands before 0F1, which it needs",
    }


def test_all_faults_are_listed_however_many(tmp_path: Path) -> None:
    schedule = build("gpipe", 2, 64)
    schedule.replace(row[:1] for row in schedule.rows).save(tmp_path / "short.json")
    result = run("verify", tmp_path / "short.json")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) > 200
    assert "more" not in result.stdout
    faults = json.loads(run("verify", tmp_path / "short.json", "--json").stdout)["faults"]
    assert len(faults) == len(result.stdout.splitlines()) - 1


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--ranks", 3, "rank 2: has no row in the file"),
        ("--microbatches", 3, "the file is for 2 microbatches, not 3"),
        ("--stages-per-rank", 2, "1 stag"),
    ],
)
def test_a_file_for_other_sizes_is_refused(option: str, value: int, said: str, tmp_path: Path) -> None:
    build("1f1b", 2, 2).save(tmp_path / "file.csv")
    result = run("verify", tmp_path / "file.csv", option, value)
    assert result.exit_code == 1
    assert said in result.stdout


@pytest.mark.parametrize("command", ["show", "verify", "simulate"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", b"\xff\xfe\x00"),
        ("a.csv", b"hello,world"),
        ("a.csv", b"0F0,0B0,999999999F0"),
        ("a.csv", b"0F" + b"9" * 5000),
        ("a.csv", b"a" * 200_000),
        ("a.json", b"{"),
        ("a.json", b"[" * 100_000),
        ("a.json", b'{"penstock_schedule": 1}'),
        ("a.json", json.dumps({**json.loads(run("show", "1f1b", "--json").stdout), "placement": [0, 7]}).encode()),
        ("a.json", json.dumps({**json.loads(run("show", "1f1b", "--json").stdout), "microbatches": 10**12}).encode()),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:20]),
)
def test_a_file_that_is_no_schedule_exits_with_1(command: str, name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    result = run(command, tmp_path / name)
    assert result.exit_code == 1
    assert "fault" in result.output
    as_json = run(command, tmp_path / name, "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["faults"][0]["message"]


# simulate


def test_simulate_prints_what_the_library_says() -> None:
    result = run("simulate", "1f1b", "-r", 4, "-m", 8)
    assert result.exit_code == 0
    assert "makespan    33\n" in result.stdout
    assert "idle share  27.3 %\n" in result.stdout
    assert "   3      27.3 %                 1            1" in result.stdout
    assert "critical path, 22 computes: 0F0 1F0 2F0 3F0 3B0" in result.stdout


def test_costs_can_be_stated_stage_by_stage() -> None:
    result = run("simulate", "gpipe", "-r", 2, "-m", 1, "--forward", "1,2", "--input", 3, "--weight", "0,4", "--json")
    assert json.loads(result.stdout)["makespan"] == 1 + 2 + (3 + 4) + (3 + 0)


def test_messages_take_latency_and_bytes_over_bandwidth() -> None:
    wires = ("--latency", 1, "--bytes", 6, "--bandwidth", 2)
    document = json.loads(run("simulate", "gpipe", "-r", 2, "-m", 1, *wires, "--json").stdout)
    assert document["makespan"] == 1 + (1 + 3) + 1 + 2 + (1 + 3) + 2


def test_jitter_is_seeded_and_reports_its_spread() -> None:
    options = ("simulate", "1f1b", "--jitter", 0.1, "--draws", 20, "--json")
    first = json.loads(run(*options).stdout)["what_if"]
    assert first == json.loads(run(*options).stdout)["what_if"]
    assert first["mean"] != json.loads(run(*options, "--seed", 1).stdout)["what_if"]["mean"]
    assert first["low"] < first["mean"] < first["high"]
    assert len(first["makespans"]) == 20
    assert "0.1 over 20 draws (seed 0): makespan" in run(*options[:-1]).stdout


# compare


def test_compare_has_every_family_in_comparable_units() -> None:
    document = json.loads(run("compare", "--json").stdout)
    assert (document["ranks"], document["microbatches"]) == (4, 8)
    families = {entry["family"]: entry for entry in document["families"]}
    assert list(families) == list(FAMILIES)
    assert families["1f1b"]["makespan"] == 33
    assert families["1f1b"]["peak_activations"] == 4
    assert families["interleaved-1f1b"]["makespan"] == 28.5
    assert "makespan" in families["zb-v"]["best"]
    assert families["forward-only"]["best"] == []


def test_compare_prints_one_line_a_family_and_marks_the_best() -> None:
    text = run("compare", "-r", 3, "-m", 6, "-v", 3).stdout
    assert "\x1b" not in text
    for name in FAMILIES:
        (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
        assert len(line.replace("*", "").split()) == 6
    assert "* best" in text
    assert "|" not in text or "family" in text


def test_compare_draws_each_family_when_asked() -> None:
    text = run("compare", "-r", 2, "-m", 2, "--draw").stdout
    assert PICTURE in text
    assert text.count("rank 1 ") == len(FAMILIES)
