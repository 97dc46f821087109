"""`penstock whatif`: predictions from a recorded run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli.recorded_run import call, save_run

from penstock.schedule import Costs, Timeline, build, simulate


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_run()
    return tmp_path


def test_whatif_states_its_error_and_predicts_others() -> None:
    text = call("whatif --from run.json -r 4 -m 8 -s zb-v -s 1f1b").stdout
    assert "makespan 7.7 s measured, 7.7 s predicted from its own costs (error +0.0 %)" in text
    assert "zb-v *" in text
    assert "500 ms that the run spent outside of it" in text
    assert "4, 8 stages are taken to be even cuts of the 2 measured" in text
    assert "I and W are taken as half of B each" in text


def test_whatif_for_a_machine() -> None:
    document = json.loads(call("whatif --from run.json --microbatches 8 --json").stdout)
    (found,) = document["predictions"]
    assert (found["schedule"], found["ranks"], found["microbatches"]) == ("1f1b", 2, 8)
    expected = simulate(build("1f1b", 2, 8), Costs(forward=0.5, input=0.5, weight=0.5, hop=0.05)).makespan
    assert found["makespan"] == pytest.approx(expected)
    assert found["step"] == pytest.approx(expected + 0.5)
    assert document["run"]["error"] == pytest.approx(0)


def test_whatif_takes_a_schedule_from_a_file_and_another_hop() -> None:
    slow = json.loads(call("whatif --from run.json -s zb.csv --hop 0.5 --json").stdout)
    fast = json.loads(call("whatif --from run.json -s zb.csv --hop 0 --json").stdout)
    assert fast["predictions"][0]["makespan"] < slow["predictions"][0]["makespan"]


def test_the_run_of_a_schedule_without_a_name_predicts_itself() -> None:
    named = Timeline.load("run.json")
    for name in ("", "mine/own.csv"):
        replace(named, schedule=named.schedule.replace(name=name)).save("own.json")
        (entry,) = json.loads(call("whatif --from own.json --json").stdout)["predictions"]
        assert entry["schedule"] == (name or "the run's own")
        assert entry["makespan"] == pytest.approx(named.makespan)
    replace(named, schedule=named.schedule.replace(name="")).save("own.json")
    assert "has no name to build others by" in call("whatif --from own.json --ranks 3", 2).stderr
