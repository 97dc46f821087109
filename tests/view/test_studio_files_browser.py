"""What goes into the studio and out of it: files, links, and everything that is neither. In a real Chromium."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser

from penstock.schedule import Schedule, build, verify
from penstock.view.studio import Shown, save_studio
from tests.view.studio_driver import press, proof, show

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_what_is_saved_is_what_the_command_reads_and_the_other_way_round(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    show(browser, page, "r=3&m=5&a=dualpipe-v&b=zb-h1")
    for place, name in enumerate(("dualpipe-v", "zb-h1")):
        expected = build(name, 3, 5)
        for kind in ("csv", "json"):
            path = tmp_path / f"saved.{kind}"
            path.write_text(browser.run(f'studio.text({place}, "{kind}")'), encoding="utf-8", newline="")
            assert Schedule.load(path) == expected
            expected.save(tmp_path / f"python.{kind}")
            assert path.read_bytes() == (tmp_path / f"python.{kind}").read_bytes()
    other = build("v-half", 4, 6)
    verify(other)  # so that its file has a certificate
    for kind in ("csv", "json"):
        other.save(tmp_path / f"other.{kind}")
        text = json.dumps((tmp_path / f"other.{kind}").read_bytes().decode())
        browser.run(f'studio.load(0, {text}, "other.{kind}")')
        assert proof(browser).startswith("✓")
        assert browser.run("[studio.state.ranks, studio.state.microbatches]") == [4, 6]
        assert browser.run('studio.text(0, "csv")') == (tmp_path / "other.csv").read_bytes().decode()


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("0F0,0X0", "a.csv", 'row 1, column 2: "0X0" is not an action'),
        ("{", "a.json", "not JSON"),
        ("{}", "a.json", '"penstock_schedule": 1'),
        ("0B0", "a.csv", "no forward"),
        ("0F0,0SEND_F0->2,0B0", "a.csv", "skips stages"),
    ],
)
def test_a_file_that_is_none_says_why(browser: Browser, page: Path, text: str, name: str, words: str) -> None:
    show(browser, page)
    browser.run(f"studio.load(0, {json.dumps(text)}, {json.dumps(name)})")
    assert words in browser.run('document.querySelector("#slot-0 .message").innerText')
    assert proof(browser).startswith("✓")


def test_a_picture_is_shared_as_its_address(browser: Browser, page: Path) -> None:
    show(browser, page, "r=3&m=4&f=2&h=0.25&cap=3&a=1f1b&b=v-min")
    press(browser, "\ue015", ".", "]")
    time.sleep(0.5)
    address = browser.run("location.hash.slice(1)")
    seen: Any = browser.run('[studio.text(0, "csv"), studio.shown[1].timeline.makespan, studio.state.cap]')
    show(browser, page, address)
    assert browser.run('[studio.text(0, "csv"), studio.shown[1].timeline.makespan, studio.state.cap]') == seen
    show(browser, page, "r=3&m=4&a=own&arows=%3Cb%3E&aon=0&am=1")
    time.sleep(0.5)
    assert "is not an action" in browser.run('document.getElementById("address").innerText')


def test_it_begins_with_what_it_is_told(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "told.html"
    save_studio(path, Shown((build("zb-h2", 3, 4).compute(), "v-min"), 3, 4))
    show(browser, path)
    assert browser.run("studio.view.runs.map((run) => run.label)") == ["zb-h2", "v-min"]
    assert browser.run("studio.shown.map((each) => each.proved)") == [True, True]


def test_a_link_brings_back_the_window_the_range_the_choice_and_the_ticks(browser: Browser, page: Path) -> None:
    """The address held the schedules alone, though the page says that it holds everything that is seen."""
    show(browser, page, "r=4&m=6&a=1f1b&b=search")
    browser.run('(studio.controls.show(2, 9), document.getElementById("critical").click(), 1)')
    browser.run(
        "(studio.view.range = {from: 0.0000004, to: 7}, studio.controls.mark(studio.view.runs[1].rows[2], 3), 1)"
    )
    time.sleep(0.5)
    seen = (
        "(({from, to, range, critical, arrows, selected: {row, place}}) => [from, to, range, critical, row.run.letter, "
        'place, document.getElementById("critical").checked, arrows])(studio.view)'
    )
    before, address = browser.run(seen), browser.run("location.hash.slice(1)")
    assert before == [2, 9, {"from": 0.0000004, "to": 7}, True, "B", 3, True, False]
    show(browser, page, address)
    until = time.monotonic() + 20
    while browser.run("studio.shown.some((each) => each.waiting) || !studio.view.selected"):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert browser.run(seen) == before
    show(
        browser, page, "t=9_2&range=Infinity_1&at=0.0.-1&r=1e9&m=x&cap=-1&a=constructor&b=own&brows=0F0-0F1&bon=0&bm=1"
    )
    time.sleep(0.4)
    assert browser.log() == []
    assert browser.run("[studio.state.ranks, studio.state.microbatches, studio.state.cap]") == [256, 16, 0]
    said = browser.run('document.getElementById("address").innerText')
    assert 'there is no family "constructor"; 1f1b is shown instead' in said
    assert '"0F0-0F1", which is not an action; zb-v is shown instead' in said


def test_undo_after_a_file_brings_the_sizes_back(browser: Browser, page: Path) -> None:
    show(browser, page, "r=4&m=6&a=1f1b&b=zb-v")
    browser.run('studio.load(0, "0F0,0SEND_F0,0B0", "mine.csv")')
    assert browser.run("[studio.state.ranks, studio.state.microbatches]") == [1, 1]
    assert "left out" in browser.run('document.querySelector("#slot-0 .message").innerText')
    browser.run('document.querySelector("#slot-0 .undo").click()')
    assert browser.run("[studio.state.ranks, studio.state.microbatches, studio.state.slots[0].source]") == [
        4,
        6,
        "1f1b",
    ]
    assert browser.run("document.querySelector('[name=\"ranks\"]').value") == "4"
    assert browser.run('document.querySelector("#slot-0 .message").innerText') == ""


def test_files_that_are_damaged_huge_or_full_of_markup_are_answered(browser: Browser, page: Path) -> None:
    show(browser, page, "r=2&m=2&a=1f1b&b=none")
    good = {
        "penstock_schedule": 1,
        "name": "x",
        "placement": [0],
        "microbatches": 1,
        "edges": [],
        "rows": [["0F0", "0B0"]],
    }
    files = {
        "edges.json": (json.dumps({**good, "placement": [0, 0], "edges": [None]}), "chains of stages only"),
        "many.json": (
            json.dumps({**good, "microbatches": 10**15}),
            "1,000,000,000,000,000, which is too much for a page",
        ),
        "tall.csv": ("\n".join(f"{rank}F0,{rank}B0" for rank in range(2000)), "ranks: 2,000, which is too much"),
        "<img src=x onerror=window.bad=1>.csv": ("0X0", "is not an action"),
    }
    for name, (text, words) in files.items():
        browser.run(f"studio.load(0, {json.dumps(text)}, {json.dumps(name)})")
        assert words in browser.run('document.querySelector("#slot-0 .message").innerText')
    browser.run(
        f"studio.load(0, {json.dumps(json.dumps({**good, 'name': '<img src=x onerror=window.bad=1>'}))}, 'a.json')"
    )
    time.sleep(0.3)
    assert browser.run("!window.bad && !document.querySelector('img')")
    reversed_rows = "\n".join(",".join(f"{rank}{op}{each}" for op in "BF" for each in range(900)) for rank in range(8))
    browser.run(f"studio.load(0, {json.dumps(reversed_rows)}, 'wrong.csv')")
    assert "7200 faults" in proof(browser)
    assert browser.run("studio.view.runs[0].rows.map((row) => row.faults.size)") == [900] * 8
    assert browser.log() == []
