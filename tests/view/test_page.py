"""The page as a file: whole, alone, and safe to put any name into."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from penstock.schedule import FAMILIES, Costs, build, simulate
from penstock.view.page import SCRIPTS, page, page_data
from penstock.view.recorded import Recorded, RecordedSteps
from penstock.view.run import Run


class Parsed(HTMLParser):
    """Tags, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)


def shown(name: str = "zb-v", label: str | None = None) -> Run:
    return Run(label or name, simulate(build(name, 3, 4), Costs(hop=0.1)))


def test_the_page_needs_nothing_from_anywhere() -> None:
    text = page([shown()])
    for tag, attributes in Parsed(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        assert not {"src", "srcset", "action"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
    assert "default-src 'none'" in text
    assert not re.findall(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_what_is_put_in_cannot_get_out() -> None:
    bad = '</script><script>alert(1)</script><img src=x onerror=alert(2)> @@DATA@@ &amp; "quoted"'
    parsed = Parsed(page([shown(label=bad)], title=bad))
    assert len(parsed.scripts) == 2
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert json.loads(parsed.scripts[0])["runs"][0]["label"] == bad
    assert bad in parsed.text


def test_the_script_never_makes_html_from_text() -> None:
    script = Parsed(page([shown()])).scripts[1]
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)
    assert len(SCRIPTS) == len(set(SCRIPTS))


def row_of(data: dict[str, Any], rank: int) -> dict[str, Any]:
    found: dict[str, Any] = data["runs"][0]["rows"][rank]
    return found


def test_the_data_are_the_timeline() -> None:
    for name in FAMILIES:
        run = shown(name)
        data = page_data([run])
        tick = data["runs"][0]["tick"]
        for rank, spans in enumerate(run.timeline.by_rank):
            row = row_of(data, rank)
            assert len(row["start"]) == len(spans)
            for place, span in enumerate(spans):
                assert abs(row["start"][place] * tick - span.start) <= tick
                assert abs(row["length"][place] * tick - span.length) <= tick
                waited = run.timeline.waited_for(span)
                assert row["peer"][place] == (-1 if waited is None else waited.rank)
                if waited is not None:
                    assert run.timeline.by_rank[waited.rank][row["cause"][place]] == waited
            assert max(row["memory"][1]) == run.timeline.peak_activations[rank]
            assert row["stages"] == len(run.timeline.schedule.placement.stages_of(rank))


def test_recorded_steps_are_drawn_where_there_are_several() -> None:
    one, two = Recorded(10, 1.0, 0.2), Recorded(20, 4.0, 0.6)
    assert page_data([shown()], RecordedSteps((one,), 10))["steps"] is None
    steps = page_data([shown()], RecordedSteps((one, one._replace(step=15), two), 10))["steps"]
    assert steps["steps"] == [[10, 1.0], [15, 1.0], [20, 4.0]]
    assert (steps["median"], steps["outliers"], steps["shown"]) == (1.0, [2], 10)


@pytest.mark.slow
def test_a_hundred_thousand_spans_are_a_few_megabytes() -> None:
    run = Run("large", simulate(build("zb-v", 16, 1042)))
    assert len(run.timeline.spans) > 100_000
    assert len(page([run])) < 5_000_000
