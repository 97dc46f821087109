"""Recorded runs as files and folders: the step that is shown, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.recorded_run import call, recorded, save_run, slower

from penstock.schedule import build, simulate
from penstock.schedule.timing.timeline import Wall


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_run()
    return tmp_path


def test_a_folder_with_one_run_is_that_run(folder: Path) -> None:
    assert "measured" in call("view .").stdout


def test_of_several_recorded_steps_the_median_is_shown_and_outliers_are_named(folder: Path) -> None:
    for name, factor in (("a", 1.1), ("b", 1.0), ("c", 3.0), ("d", 1.2)):
        slower(factor).save(f"steps-{name}.json")
    (folder / "steps").mkdir()
    for path in folder.glob("steps-*.json"):
        path.rename(folder / "steps" / path.name)
    text = " ".join(call("view steps --width 100").stdout.split())
    assert text.startswith("This machine has 1 core for 2 ranks, so ranks take turns")
    assert "steps holds 4 recorded steps, numbered by name; step 1 is steps-a.json." in text
    assert "Median 8.855 s of 4 recorded steps" in text
    assert "all within 7.7 s and 23.1 s." in text
    assert "Outliers among them: step 3 (2.6 times the median)." in text
    call("view steps --html steps.html")
    page = (folder / "steps.html").read_text()
    assert page.index("This machine has 1 core") < page.index("Outliers among them") < page.index('id="runs"')
    (folder / "steps" / "other.json").write_text((folder / "run.json").read_text().replace('"1f1b"', '"mine"'))
    build("gpipe", 2, 2).save("gpipe.json")
    recorded(simulate(build("gpipe", 2, 2)), tuple(Wall(0, 9, 9) for _ in "ab")).save("steps/gpipe.json")
    assert "6 recorded runs of different schedules" in call("view steps", 2).stderr


def test_the_folder_of_a_training_run_says_what_the_run_has_noted(folder: Path) -> None:
    run = folder / "trained"
    run.mkdir()
    (folder / "run.json").rename(run / "timeline.json")
    steps = [[10, 1.0, 0.1], [20, 9.0, 0.8], [30, 1.1, 0.2]]
    (run / "recorded.json").write_text(json.dumps({"typical": 30, "of": 3, "cores": 1, "ranks": 2, "steps": steps}))
    notes = json.loads(call("view trained --json").stdout)["notes"]
    assert [note.split()[0] for note in notes] == ["This", "The", "Median", "Outliers"]
    (run / "recorded.json").write_text("[1, 2]")
    (note,) = json.loads(call("view trained --json").stdout)["notes"]
    assert note.startswith("recorded.json cannot be read")
