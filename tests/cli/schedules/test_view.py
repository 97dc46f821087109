"""`penstock view` and `penstock whatif`: files, several inputs, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli.recorded_run import call, save_run
from typer.testing import CliRunner

from penstock.cli import app
from penstock.schedule import Timeline, build


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_run()
    return tmp_path


def test_a_schedule_is_drawn() -> None:
    text = call("view zb-v --ranks 2 --microbatches 3").stdout
    assert text.startswith("zb-v: 2 ranks, 4 stages, 3 microbatches, simulated\nrank 0 F0")
    assert "backward for the weights" in text


def test_one_of_anything_is_not_many() -> None:
    assert call("view 1f1b -r 1 -m 1").stdout.startswith("1f1b: 1 rank, 1 stage, 1 microbatch, simulated\n")


@pytest.mark.parametrize("command", ["view run.json short.csv", "whatif --from run.json --schedule short.csv"])
def test_of_several_files_the_one_with_faults_is_named(command: str) -> None:
    Path("short.csv").write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    assert "rank 0, 0B1: short.csv: never runs" in call(command, 1).stderr


def test_a_run_is_drawn_and_accounted_for() -> None:
    text = call("view run.json").stdout
    assert "run.json: 2 ranks, 2 stages, 4 microbatches, measured" in text
    assert "rank 0: 8.2 s = F 24.4 %, B 48.8 %" in text
    assert "critical path" in text


def test_a_run_beside_its_prediction_and_another_schedule() -> None:
    document = json.loads(call("view run.json zb.csv zb-v --predicted --json").stdout)
    labels = [run["label"] for run in document["runs"]]
    assert labels == ["run.json, predicted", "run.json", "zb.csv", "zb-v"]
    predicted, run, other, v = document["runs"]
    assert predicted["makespan"] == pytest.approx(run["makespan"])
    assert other["makespan"] < run["makespan"]
    assert {entry["unit"] for entry in document["runs"]} == {"s"}
    assert (v["ranks"], v["microbatches"]) == (2, 4)
    assert [run["measured"] for run in document["runs"]] == [False, True, False, False]


def test_several_schedules_are_priced_by_the_rank() -> None:
    one, two = json.loads(call("view 1f1b interleaved-1f1b -r 4 -m 8 --json").stdout)["runs"]
    assert two["makespan"] < one["makespan"]


def test_every_kind_of_file_is_written(folder: Path) -> None:
    text = call("view run.json zb-v --html a.html --svg a.svg --png a.png --trace a.json").stdout
    assert text.endswith("saved to a.html, a.svg, a.png, a.json\n")
    assert (folder / "a.html").read_text().startswith("<!doctype html>")
    assert (folder / "a.svg").read_text().startswith("<svg")
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "a.json").read_text())["traceEvents"]


def test_a_file_takes_the_place_of_the_chart(folder: Path) -> None:
    assert call("view run.json 1f1b --html a.html").stdout == "saved to a.html\n"
    assert json.loads(call("view run.json --html a.html --json").stdout)["runs"]


def test_memory_is_shown_in_bytes_where_they_are_known(folder: Path) -> None:
    assert "a rank holds at most 4 GB" in call("view zb-v -r 2 -m 4 --activation 2e9 --width 200").stdout
    assert "'much' is not a number" in call("view zb-v --activation much", 2).stderr


def test_the_shell_completes_commands_and_families() -> None:
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock view zb", "COMP_CWORD": "2"}
    command = Path(sys.executable).parent / "penstock"
    done = subprocess.run([command], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["zb-h1", "zb-h2", "zb-v"]
    assert "--install-completion" in call("--help").stdout


WRONG = {
    "view": (2, "Missing argument"),
    "view nowhere.json": (2, "there is no file nowhere.json"),
    "view zbv2": (2, "did you mean zb-v?"),
    "view runs/nowhere": (2, "there is no file or folder runs/nowhere"),
    "view nowhere": (2, "nor a file or folder of that name"),
    "view empty": (2, "the folder empty holds no recorded run"),
    "view 1f1b --html nowhere/a.html": (2, "nowhere/a.html"),
    "view 1f1b --width 3": (2, "give 24 or more"),
    "view 1f1b --forward fast": (2, "'fast' is not a number"),
    "view broken.json": (1, "broken.json: no complete timeline in JSON: 'spans' is missing or wrong"),
    "whatif": (2, "Missing option '--from'"),
    "whatif --from nowhere.json": (2, "there is no recorded run nowhere.json"),
    "whatif --from zb.csv": (1, "zb.csv is not a recorded run"),
    "whatif --from broken.json": (1, "'spans' is missing or wrong"),
    "whatif --from empty.json": (1, "nothing was recorded"),
    "whatif --from run.json --schedule nothing": (2, "nothing"),
    "whatif --from run.json --hop x": (2, "'x' is not a number"),
}


@pytest.mark.parametrize("command", WRONG)
def test_what_is_wrong_is_said_with_the_right_exit_code(command: str, folder: Path) -> None:
    (folder / "broken.json").write_text('{"penstock_timeline": 1}')
    (folder / "empty").mkdir()
    Timeline(build("1f1b", 2, 2), ()).save("empty.json")
    code, words = WRONG[command]
    assert words in call(command, code).stderr


def test_a_terminal_without_utf8_gets_plain_dots() -> None:
    result = subprocess.run(
        [Path(sys.executable).parent / "penstock", "view", "1f1b", "-r", "2", "-m", "3", "--width", "60"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\\x" not in result.stdout
    assert "rank 1 ...." in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 60


@pytest.mark.parametrize("text", ["\x1b[31ms", "s" * 1000])
def test_a_files_unit_and_name_cannot_write_to_a_terminal(text: str) -> None:
    document = json.loads(Path("run.json").read_text())
    Path("odd.json").write_text(json.dumps({**document, "unit": text}))
    assert "odd.json: unit is not a unit of time" in call("view odd.json", 1).stderr
    if not text.isprintable():
        document["schedule"]["name"] = text
        Path("odd.json").write_text(json.dumps(document))
        assert "'name' is missing or wrong" in call("whatif --from odd.json", 1).stderr


def test_a_files_own_name_cannot_break_a_picture() -> None:
    odd = Path("\x1b[31m<b>.json")
    odd.write_text(Path("run.json").read_text())
    result = CliRunner().invoke(app, ["view", str(odd), "--svg", "odd.svg", "--html", "odd.html"])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout.replace(str(odd), "")
    assert ElementTree.parse("odd.svg").getroot().tag.endswith("svg")
