"""Several recorded steps: the median is shown, the spread is named, outliers are marked."""

from __future__ import annotations

import pytest

from penstock.view.recorded import Recorded, RecordedSteps, cores_note, run_notes


def steps(*makespans: float) -> RecordedSteps:
    return RecordedSteps.of([Recorded(10 * place, time, 0.25) for place, time in enumerate(makespans, 1)])


def test_the_median_step_is_shown_and_of_two_in_the_middle_the_faster() -> None:
    assert steps(3.0, 1.0, 2.0).shown == 30
    assert steps(3.0, 1.0, 2.0, 9.0).shown == 30


def test_the_spread_is_named_with_quartiles_where_they_mean_something() -> None:
    assert steps(1.0).spread() == ""
    assert steps(1.0, 2.0).spread() == "Median 1.5 s of 2 recorded steps: all within 1 s and 2 s."
    expected = "Median 3 s of 5 recorded steps: half of them within 2 s and 4 s, all within 1 s and 5 s."
    assert steps(5.0, 1.0, 3.0, 2.0, 4.0).spread() == expected


def test_outliers_are_those_far_above_the_median_the_slowest_first() -> None:
    found = steps(1.0, 1.1, 1.0, 4.0, 1.6, 0.1)
    assert [entry.step for entry in found.outliers] == [40, 50]
    assert found.outlier_note().startswith("Outliers among them: step 40 (3.8 times the median), step 50")
    assert steps(1.0, 1.2).outlier_note() == ""
    assert found.document()["outliers"] == [3, 4]


def test_fewer_cores_than_ranks_are_said_first() -> None:
    assert cores_note(4, 4) == cores_note(0, 4) == ""
    document = {"cores": 2, "ranks": 4, "steps": [[10, 1.0, 0.2], [20, 2.0, 0.4]], "typical": 20}
    notes = run_notes(document, RecordedSteps.read(document))
    assert notes[0].startswith("This machine has 2 cores for 4 ranks, so ranks take turns")
    assert "no rebalancing helps" in notes[0]
    assert notes[1].startswith("The timeline is of step 20, the nearest to the median of 2 recorded steps: 2 s, 40.0 %")


def test_what_is_no_list_of_steps_is_refused_by_kind() -> None:
    assert RecordedSteps.read({"steps": []}) is None
    for document in ({}, {"steps": [[1, 2]]}, {"steps": [["x", 1, 1]]}, {"steps": 3}):
        with pytest.raises((KeyError, ValueError, TypeError)):
            RecordedSteps.read(document)
