"""`penstock compare`: every family side by side."""

from __future__ import annotations

import json

from command import PICTURE, run

from penstock.schedule import FAMILIES


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
        assert len(line.replace("*", "").split()) == 8
    assert "* best" in text
    assert "|" not in text or "family" in text


def test_compare_draws_each_family_when_asked() -> None:
    text = run("compare", "-r", 2, "-m", 2, "--draw").stdout
    assert PICTURE in text
    assert text.count("rank 1 ") == len(FAMILIES)
