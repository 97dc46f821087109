"""The studio in a real Chromium. Without one these tests fail: `apt-get install chromium chromium-driver`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from chromium import Browser

from penstock.view.page import asset, embedded
from penstock.view.studio import RULES, studio_data
from tests.view.studio_cases import cases
from tests.view.studio_driver import at, press, proof, show

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CASES = 390  # of every family 30
COMPARE = Path(__file__).with_name("studio_compare.js")


@pytest.mark.timeout(600)
def test_the_rules_of_the_page_are_pythons_in_hundreds_of_cases(browser: Browser, tmp_path: Path) -> None:
    """Schedules, times, critical paths, bounds and the faults of damaged schedules, letter by letter."""
    given = list(cases(CASES, seed=20))
    assert sum(bool(case["faults"]) for case in given) > CASES / 3
    data = studio_data()
    script = "\n".join([*map(asset, RULES), COMPARE.read_text(encoding="utf-8")])
    path = tmp_path / "compare.html"
    path.write_text(
        f'<!doctype html><meta charset="utf-8"><script type="application/json" id="given">{embedded([data, given])}'
        '</script><script>const [DATA, CASES] = JSON.parse(document.getElementById("given").textContent);'
        f"const RULES = DATA.rules, FAMILIES = DATA.families;\n{script}</script>",
        encoding="utf-8",
    )
    browser.open(path)
    compared = 0
    for first in range(0, CASES, 130):
        found: list[list[str]] = browser.run(f"CASES.slice({first}, {first + 130}).map(differences)")
        odd = [(case["build"], case["costs"], each) for case, each in zip(given[first:], found, strict=False) if each]
        assert not odd, odd[:3]
        compared += len(found)
    assert compared == CASES


@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (390, False)])
def test_it_loads_without_a_word_on_the_console_and_fits(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.size(width, 900, mobile=width < 500)
    browser.dark(dark)
    browser.log()
    show(browser, page)
    time.sleep(0.3)
    assert browser.log() == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    ground = "rgb(18, 21, 26)" if dark else "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.documentElement).backgroundColor") == ground
    browser.size(1300, 2400)
    browser.dark(False)


def test_controls_change_both_schedules_at_once(browser: Browser, page: Path) -> None:
    show(browser, page, "r=4&m=8&a=1f1b&b=zb-v")
    before = browser.run("studio.shown.map((each) => each.timeline.makespan)")
    browser.run(
        """(() => { const input = document.querySelector('[name="hop"]'); input.value = "0.5";
          input.dispatchEvent(new Event("input")); })()"""
    )
    after = browser.run("studio.shown.map((each) => each.timeline.makespan)")
    assert all(now > then for now, then in zip(after, before, strict=True))
    figures = browser.run('document.querySelector("#slot-1 .figures").innerText')
    assert "lower bound" in figures
    time.sleep(0.5)
    assert "h=0.5" in browser.run("location.hash")
    names = browser.run('[...document.querySelectorAll("#scatter .name")].map((each) => each.textContent)')
    assert {"A 1f1b", "B zb-v", "v-min"} <= set(names)


def test_a_schedule_that_breaks_the_cap_says_so_and_claims_no_bound(browser: Browser, page: Path) -> None:
    """Within the cap nothing is shorter than the bound; what takes more memory may be."""
    show(browser, page, "r=8&m=32&h=0.2&cap=6&a=zb-v&b=v-half")
    broken, kept = (browser.run(f'document.querySelector("#slot-{place} .figures").innerText') for place in (0, 1))
    assert "8 (over the cap)" in broken
    assert "within the cap" in broken
    assert "reached" not in broken
    assert "above it" in kept


def test_dragging_an_action_says_at_once_whether_the_proof_holds_and_why_not(browser: Browser, page: Path) -> None:
    show(browser, page, "r=4&m=6&a=1f1b&b=zb-v")
    assert proof(browser).startswith("✓ The proof holds")
    assert browser.run("studio.view.runs[0].rows[1].name(3)") == "1B0"
    (x, y), (first, _) = at(browser, 0, 1, 3), at(browser, 0, 1, 0)
    press_down, release = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
    move = {"type": "pointerMove", "x": round(first) - 20, "y": round(y), "duration": 60}
    browser.point(x, y, press_down, move, release)
    time.sleep(0.3)
    assert "rank 1, position 0, 1B0: stands before 1F0, which it needs" in proof(browser)
    assert browser.run("studio.view.runs[0].rows[1].faults.has(0)")
    assert proof(browser, 1).startswith("✓")
    browser.run('document.querySelector("#slot-0 .undo").click()')
    assert proof(browser).startswith("✓")
    assert browser.run("studio.state.slots[0].source") == "1f1b"


@pytest.mark.parametrize(("width", "beside"), [(1300, True), (700, False)])
def test_two_schedules_stand_side_by_side_where_there_is_room(
    browser: Browser, page: Path, width: int, beside: bool
) -> None:
    """They stood one above the other on every screen, because both share a canvas."""
    browser.size(width, 1600)
    show(browser, page, "r=4&m=8&a=1f1b&b=gpipe")
    (ax, ay), (bx, by) = at(browser, 0, 0, 0), at(browser, 1, 0, 0)
    assert (ay == by and bx > ax + width / 3) if beside else (ax == pytest.approx(bx, abs=2) and by > ay + 40)
    box = 'const box = document.getElementById("chart").getBoundingClientRect();'
    for run, (x, y) in enumerate([(ax, ay), (bx, by)]):  # what is under the pointer is found in either column
        found = f"studio.gantt.at({x} - box.left, {y} - box.top)"
        assert browser.run(f"(() => {{ {box} const hit = {found}; return [hit.row.run.number, hit.place]; }})()") == [
            run,
            0,
        ]
    browser.size(1300, 2400)


def test_an_action_of_the_second_schedule_is_dragged_in_its_own_column(browser: Browser, page: Path) -> None:
    show(browser, page, "r=2&m=4&a=1f1b&b=gpipe")
    (x, y), (last, _) = at(browser, 1, 0, 0), at(browser, 1, 0, 2)
    move = {"type": "pointerMove", "x": round(last) + 4, "y": round(y), "duration": 60}
    browser.point(x, y, {"type": "pointerDown", "button": 0}, move, {"type": "pointerUp", "button": 0})
    time.sleep(0.3)
    assert browser.run("studio.state.slots.map((slot) => slot.source === 'own')") == [False, True]
    assert browser.run("studio.view.runs[1].rows[0].name(2)") == "0F0"


def test_actions_are_moved_and_brought_back_by_keys_alone(browser: Browser, page: Path) -> None:
    show(browser, page, "r=2&m=3&a=gpipe&b=none")
    press(browser, "\ue015", ".", "]")  # the first action of rank 0, the next one, later
    assert browser.run("studio.state.slots[0].own.rows[0].map((cell) => cell[0].microbatch)") == [0, 2, 1, 0, 1, 2]
    assert proof(browser).startswith("✓")
    press(browser, "}")  # to rank 1
    assert "0F1: stage 0 lives on rank 0" in proof(browser)
    press(browser, "u", "u")
    assert browser.run("studio.state.slots[0].source") == "gpipe"


@pytest.mark.parametrize(("ranks", "microbatches", "cap"), [(4, 8, 4), (4, 12, 2.5), (8, 32, 8), (3, 7, 1)])
def test_the_quick_search_is_proved_within_the_cap_and_no_worse_than_a_family(
    browser: Browser, page: Path, ranks: int, microbatches: int, cap: float
) -> None:
    show(browser, page, f"r={ranks}&m={microbatches}&w=0.6&h=0.1&cap={cap}&a=search&b=none")
    until = time.monotonic() + 60
    while browser.run("studio.shown[0].waiting === true"):
        assert time.monotonic() < until
        time.sleep(0.1)
    makespan, memory, proved, bound = browser.run(
        "(({timeline, memory, proved, bound}) => [timeline.makespan, memory, proved, bound])(studio.shown[0])"
    )
    assert proved
    assert memory <= cap
    assert makespan >= bound * (1 - 1e-9)
    for family in ("1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved-zb"):
        show(browser, page, f"r={ranks}&m={microbatches}&w=0.6&h=0.1&cap={cap}&a={family}&b=none")
        other, held = browser.run("[studio.shown[0].timeline.makespan, studio.shown[0].memory]")
        assert held > cap or makespan <= other * (1 + 1e-9), family


def test_the_timeline_stays_where_it_is_when_the_proof_fails(browser: Browser, page: Path) -> None:
    """The list of faults pushed it down, away from the pointer that was dragging an action."""
    show(browser, page, "r=4&m=6&a=1f1b&b=zb-v")
    top = 'document.getElementById("chart").getBoundingClientRect().top'
    before = browser.run(top)
    press(browser, "\ue015", "}", "}")
    assert "faults" in proof(browser)
    assert browser.run(top) == before


def test_a_finger_can_hit_everything_on_a_phone(browser: Browser, page: Path) -> None:
    browser.size(390, 844, mobile=True)
    browser.devtools("Emulation.setTouchEmulationEnabled", enabled=True)
    show(browser, page, "r=4&m=6&a=1f1b&b=zb-v")
    small = browser.run(
        """[...document.querySelectorAll("button, select, input:not([hidden])")].map((each) => {
          const box = (each.type === "checkbox" ? each.closest("label") : each).getBoundingClientRect();
          return [each.id || each.name || each.className, box.width, box.height]; })
          .filter(([, width, height]) => width < 40 || height < 40)"""
    )
    assert small == []
    assert browser.run("studio.controls.moving") is False  # a finger scrolls, unless it is told to move actions
    time.sleep(0.3)
    browser.run(
        """(() => { const svg = document.getElementById("scatter");
          const dot = svg.querySelector('[aria-label^="gpipe"]').getBoundingClientRect();
          svg.dispatchEvent(new MouseEvent("click", { clientX: dot.left - 8, clientY: dot.top - 8 })); })()"""
    )
    assert browser.run("studio.state.slots[0].source") == "gpipe"
    browser.devtools("Emulation.setTouchEmulationEnabled", enabled=False)
    browser.size(1300, 2400)
