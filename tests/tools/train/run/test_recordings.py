"""Which recorded step is shown, and what is said about it first."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule import Costs, Timeline, build, simulate
from penstock.tools.train.config.read import load_config
from penstock.tools.train.run.closing import save_run_page
from penstock.tools.train.run.recordings import Recordings, read_recorded, recorded_notes
from penstock.tools.train.run.run_folder import RunFolder


def step_of(seconds: float, slow: int = 0) -> Timeline:
    """A measured step of two ranks, one of whose stages is slow."""
    forward = [seconds * (3 if stage == slow else 1) for stage in range(2)]
    timeline = simulate(build("1f1b", 2, 4), Costs(forward=forward, input=forward, weight=0.0, hop=0.0))
    return replace(timeline, spans=timeline.spans, unit="s")


class Machine:
    """A pipeline that 'measures' what it is told to."""

    def __init__(self, steps: list[Timeline]) -> None:
        self.steps = steps

    @contextmanager
    def record(self) -> Any:
        yield self.steps.pop(0)


def recorded(folder: RunFolder, steps: list[Timeline], start: int = 0) -> Recordings:
    config = load_config(None, ["logging.every=10", "training.steps=1000", "pipeline.workers=threads"])
    recordings = Recordings(config, Machine(steps), folder, start, writes=True)  # type: ignore[arg-type]
    for step in range(start + 1, start + 10 * len(steps) + 1):
        recordings.begin(step)
        found = recordings.end(step, last=False)
        assert (found is not None) == (step % 10 == 0)
    return recordings


def test_the_median_step_is_shown_and_outliers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    seconds = [1.0, 9.0, 1.2, 1.1, 5.0]
    recorded(folder, [step_of(each) for each in seconds])
    assert Timeline.load(folder.timeline).makespan == pytest.approx(step_of(1.2).makespan)
    entries, document = read_recorded(folder)
    assert [entry.step for entry in entries] == [10, 20, 30, 40, 50]
    assert document["typical"] == 30
    first, which, spread, outliers = recorded_notes(folder)
    assert first.startswith("This machine has 2 cores for 4 ranks, so ranks take turns")
    assert which.startswith("The timeline is of step 30, the nearest to the median of 5 recorded steps")
    assert "of 5 recorded steps: half of them within " in spread
    assert outliers == "Outliers among them: step 20 (7.5 times the median), step 50 (4.2 times the median)."
    folder.metrics.write_text(
        '{"step": 1, "loss": 3.0, "memory": [5000000, 7000000], "tokens_per_second": 10, "mfu": 0.125}\n'
        '{"step": 2, "loss": "nan"}\n{"step": 3, "loss": 2.0, "validation": 2.5, "memory": [5000000, 7000000]}\n'
    )
    folder.memory.write_text(json.dumps([{"activations": 3e6}, {"activations": 1e6}]))
    save_run_page(folder)
    text = folder.page.read_text(encoding="utf-8")
    assert text.index("This machine has 2 cores") < text.index("The timeline is of step 30") < text.index('id="runs"')
    assert "10 tokens/s (median); 12.5% of the devices&#x27; peak (MFU); memory by process 5, 7 MB" in text
    assert 'id="loss"' in text
    run = json.loads(text.split('id="data">')[1].split("</script>")[0])["runs"][0]
    assert "step 30" in run["label"]
    assert run["activation"] == [1.5e6, 1e6]  # rank 0 holds two microbatches at its peak, rank 1 one


def test_a_run_that_goes_on_keeps_the_steps_of_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    recorded(folder, [step_of(1.0), step_of(2.0), step_of(3.0)])
    recorded(folder, [step_of(4.0), step_of(1.8)], start=20)  # step 30 is done again
    assert [entry.step for entry in read_recorded(folder)[0]] == [10, 20, 30, 40]
    assert read_recorded(folder)[0][2].makespan == step_of(4.0).makespan
    assert read_recorded(folder)[1]["typical"] == 40  # of those at hand the nearest to 1.8, the median of all four


@pytest.mark.parametrize(
    "forged",
    [
        {"steps": 3},
        {"steps": [[1, 2]]},
        {"steps": [["x", 1.0, 0.1]]},
        {"steps": [[float("inf"), 1.0, 0.1]]},
        {"steps": [[1, 1.0, 0.1]], "cores": "x", "ranks": 2},
        {"steps": [[1, 1.0, 0.1]], "typical": [1]},
        {"steps": [[1, 1.0, 0.1]], "of": "many"},
        {},
    ],
)
def test_a_note_of_somebody_else_is_read_as_it_should_be_or_not_at_all(forged: Any, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.recorded.write_text(json.dumps(forged))
    assert read_recorded(folder) == ([], {})
    assert recorded_notes(folder) == []


def test_figures_of_somebody_else_do_not_keep_the_page_from_being_made(tmp_path: Path) -> None:
    folder, timeline = RunFolder(tmp_path), simulate(build("1f1b", 2, 2), Costs())
    replace(timeline, unit="s").save(folder.timeline)
    folder.metrics.write_text('{"step": 1, "tokens_per_second": "x", "mfu": "x", "memory": "x", "loss": 2.5}\n')
    folder.memory.write_text(json.dumps([{"activations": 10**400}, {"activations": True}]))
    assert save_run_page(folder) == folder.page
    assert "The run: 1 steps." in folder.page.read_text()


def test_a_folder_without_recordings_has_no_page(tmp_path: Path) -> None:
    assert save_run_page(RunFolder(tmp_path)) is None
    assert read_recorded(RunFolder(tmp_path)) == ([], {})
    assert recorded_notes(RunFolder(tmp_path)) == []
