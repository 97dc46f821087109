"""The studio as a file: whole, alone, small; and what it is told by Python."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from penstock.errors import UsageError
from penstock.schedule import FAMILIES, Op, Schedule, build
from penstock.schedule.dependencies import makes, needs
from penstock.schedule.topology import Topology
from penstock.view.studio import SCRIPTS, Shown, save_studio, studio_data, studio_page

MOST_BYTES = 500_000


def test_the_page_is_one_small_file_that_needs_nothing(tmp_path: Path) -> None:
    save_studio(tmp_path / "studio.html")
    text = (tmp_path / "studio.html").read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    assert "default-src 'none'" in text
    assert not re.findall(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\(|\ssrc=", text)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert len(SCRIPTS) == len(set(SCRIPTS))


def test_the_dependency_rule_is_the_one_of_python() -> None:
    rules = studio_data()["rules"]
    chain = Topology.chain(6)
    for op in (Op.F, Op.B, Op.I, Op.W):
        for stage in range(6):
            told = [(value, stage + offset) for value, offset in rules["needs"][op] if 0 <= stage + offset < 6]
            assert told == list(needs(op, stage, chain))
        assert rules["makes"][op] == list(makes(op))


def test_it_knows_every_family() -> None:
    told = studio_data()["families"]
    assert {name: entry["layout"] for name, entry in told.items()} == {
        name: entry.layout for name, entry in FAMILIES.items()
    }
    assert all(entry["summary"] for entry in told.values())


def test_what_it_begins_with_is_an_address() -> None:
    assert Shown().address() == ""
    words = parse_qs(Shown(("1f1b", build("dualpipe-v", 2, 4)), 2, 4).address())
    assert (words["a"], words["b"], words["r"], words["m"]) == (["1f1b"], ["own"], ["2"], ["4"])
    assert words["bon"] == ["0.1.1.0"]
    assert "-" in words["brows"][0]  # a pair
    assert Shown((build("forward-only", 1, 1),)).address().endswith("af=1")


def test_stages_that_skip_others_are_refused() -> None:
    skipping = build("1f1b", 3, 3, skips=[(0, 2)])
    with pytest.raises(UsageError, match="chains of stages"):
        studio_page(Shown((skipping,)))


def test_a_name_that_looks_like_markup_stays_data() -> None:
    schedule = Schedule([["0F0", "0B0"]], name="</script><b id=bad>")
    assert "</script><b" not in studio_page(Shown((schedule,)))
