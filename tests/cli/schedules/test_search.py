"""`penstock search`: what it prints, saves and refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import app
from penstock.schedule import Costs, Schedule, simulate, stage_costs, verify


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["search", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_it_says_what_was_found_and_how_good_it_is() -> None:
    result = run("-r", 4, "-m", 8, "--memory", 4, "-v", 1, "--seconds", 0)
    assert result.exit_code == 0
    assert "auto: 4 ranks, 4 stages, 8 microbatches; placement loop, 1 per rank" in result.stdout
    assert "makespan    27" in result.stdout
    assert "lower bound 27: nothing is shorter" in result.stdout
    assert "\x1b" not in result.output


def test_what_it_saves_is_what_it_priced(tmp_path: Path) -> None:
    path = tmp_path / "best.csv"
    options = ("--forward", 2, "--weight", 1, "--hop", 0.1, "--memory", 6, "--activation", 2, "--held", 1)
    document = json.loads(run("-r", 3, "-m", 6, *options, "--seconds", 0, "--save", path, "--json").stdout)
    schedule = Schedule.load(path)
    verify(schedule)
    costs = stage_costs(Costs(2, 1, 1, hop=0.1, activation=2, held=1), schedule.placement.stages_per_rank)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == pytest.approx(document["makespan"])
    assert max(timeline.peak_memory) <= 6
    assert document["lower_bound"] <= document["value"]
    assert document["placement"] == list(schedule.placement)


def test_an_effort_gives_the_same_answer_every_time() -> None:
    options = ("-r", 3, "-m", 6, "--hop", 0.2, "--memory", 2, "--effort", 300, "--json")
    first, again = (json.loads(run(*options).stdout) for _ in range(2))
    del first["seconds"], again["seconds"]
    assert first == again


def test_it_draws_on_demand() -> None:
    assert "rank 1 .   1F0" in run("-r", 2, "-m", 2, "-v", 1, "--seconds", 0, "--draw").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", 0.5), "one microbatch alone holds 1"),
        (("--stages-per-rank", "two"), "not a list of whole numbers"),
        (("--placements", "loop,w"), "no placement 'w'"),
        (("--objective", "memory"), "makespan, span or steady"),
        (("--effort", 0), "effort must be a whole number of at least 1"),
        (("--seconds", "soon"), "--seconds: 'soon' is not a number"),
        (("--seconds", 1, "--effort", 9), "give one of them"),
    ],
)
def test_what_cannot_work_is_refused(options: tuple[object, ...], message: str) -> None:
    result = run("-r", 2, "-m", 2, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_costs_by_stage_and_memory_by_rank() -> None:
    result = run("-r", 2, "-m", 6, "--forward", "1,2,2,1", "--memory", "4,6", "--seconds", 0, "--json")
    document = json.loads(result.stdout)
    assert document["stages"] == 4
    assert document["peak_memory"][0] <= 4 < document["peak_memory"][1] <= 6
    refused = run("-r", 2, "-m", 6, "--forward", "1,2,2", "--seconds", 0)
    assert refused.exit_code == 2
    assert "forward is for 3 stages" in refused.stderr


@pytest.mark.parametrize(("file", "why"), [("x.txt", "ends in .csv or .json"), ("no/x.json", "there is no folder no")])
def test_a_file_that_cannot_be_written_is_refused_before_the_search(file: str, why: str) -> None:
    """It was refused afterwards, and what an hour had found was lost."""
    result = run("-r", 2, "-m", 4, "--save", file, "--seconds", 3600)
    assert result.exit_code == 2
    assert why in result.stderr
