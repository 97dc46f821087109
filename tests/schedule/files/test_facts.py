"""Files against stated facts: checked, never overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import Schedule, Topology, build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for suffix in ("csv", "json"):
        build("1f1b", 2, 3).save(tmp_path / f"x.{suffix}")
    return tmp_path


@pytest.mark.parametrize("suffix", ["csv", "json"])
@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"microbatches": 4}, "the file is for 3 microbatches, not 4 microbatches"),
        ({"microbatches": 2}, "the file is for 3 microbatches, not 2 microbatches"),
        ({"stages": 1}, "the file is for 2 stages, not 1 stage"),
        ({"ranks": 3}, "rank 2: has no row in the file, which has 2"),
        ({"forward_only": True}, "forward_only=False, not forward_only=True"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_a_file_for_something_else_is_refused_with_both_values(
    folder: Path, suffix: str, facts: dict[str, Any], why: str, check: bool
) -> None:
    with pytest.raises(ScheduleError, match=why):
        Schedule.load(folder / f"x.{suffix}", check=check, **facts)


def test_another_placement_is_refused(folder: Path) -> None:
    with pytest.raises(ScheduleError, match="the file is for placement 0 1, not placement 1 0"):
        Schedule.load(folder / "x.json", placement=[1, 0], check=False)
    with pytest.raises(ScheduleError, match="rank 0, position 0, 0F0: stage 0 lives on rank 1"):
        Schedule.load(folder / "x.csv", placement=[1, 0])


def test_json_is_held_against_every_fact_it_says(folder: Path) -> None:
    for facts in ({"topology": Topology(2, [])}, {"name": "gpipe"}, {"passes": ["transfers"]}):
        with pytest.raises(ScheduleError, match="the file is for"):
            Schedule.load(folder / "x.json", **facts)
    facts = {"topology": Topology.chain(2), "name": "1f1b", "passes": [], "placement": [0, 1], "forward_only": False}
    assert Schedule.load(folder / "x.json", ranks=2, stages=2, microbatches=3, **facts) == build("1f1b", 2, 3)


def test_several_wrong_facts_are_reported_together(folder: Path) -> None:
    for suffix in ("csv", "json"):
        with pytest.raises(ScheduleError) as caught:
            Schedule.load(folder / f"x.{suffix}", ranks=1, microbatches=4, stages=5, forward_only=True)
        assert len(caught.value.faults) == 4


def test_csv_takes_what_it_cannot_say(folder: Path) -> None:
    loaded = Schedule.load(folder / "x.csv", name="mine", topology=Topology(2, []))
    assert (loaded.name, loaded.topology.edges) == ("mine", ())


@pytest.mark.parametrize("suffix", ["csv", "json"])
@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"microbatch": 3}, "a schedule has no property microbatch; known: forward_only, microbatches, name"),
        ({"microbatches": True}, "whole number"),
        ({"ranks": 2.0}, "whole number"),
        ({"topology": [(0, 1)]}, "topology is a Topology, such as"),
    ],
)
def test_what_is_no_fact_is_a_usage_error(folder: Path, suffix: str, facts: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Schedule.load(folder / f"x.{suffix}", **facts)
