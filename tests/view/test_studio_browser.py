"""The studio in a real Chromium. Without one these tests fail: `apt-get install chromium chromium-driver`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser

from penstock.schedule import Schedule, build, verify
from penstock.view.document import asset, embedded
from penstock.view.studio import RULES, Shown, save_studio, studio_data
from tests.view.studio_cases import cases

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CASES = 1040  # of every family 80
COMPARE = Path(__file__).with_name("studio_compare.js")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        found.size(1300, 2400)
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studio") / "studio.html"
    save_studio(path)
    return path


def show(browser: Browser, page: Path, address: str = "") -> None:
    """The page with what stands after the `#` of its address; freshly loaded."""
    browser.devtools("Page.navigate", url="about:blank")
    browser.devtools("Page.navigate", url=f"{page.as_uri()}#{address}")
    until = time.monotonic() + 30
    while not browser.run("window.studio && window.studio.shown.length"):
        assert time.monotonic() < until, browser.log()
        time.sleep(0.05)


def proof(browser: Browser, slot: int = 0) -> str:
    return str(browser.run(f'document.querySelector("#slot-{slot} .proof").innerText'))


def press(browser: Browser, *keys: str) -> None:
    browser.run('document.getElementById("chart").focus()')
    browser.press(*keys)
    time.sleep(0.1)


def at(browser: Browser, run: int, rank: int, place: int) -> tuple[float, float]:
    """The middle of a span, in the window."""
    x, y = browser.run(
        f"""(() => {{
          const box = document.getElementById("chart").getBoundingClientRect(), {{gantt, view}} = studio;
          const row = view.runs[{run}].rows[{rank}], found = gantt.places.find((entry) => entry.row === row);
          const {{slope, shift}} = gantt.pixels(row.run);
          const middle = (row.start[{place}] + row.length[{place}] / 2) * slope + shift;
          return [box.left + found.left + gantt.gutter + middle, box.top + found.y + gantt.rowHeight / 2];
        }})()"""
    )
    return x, y


@pytest.mark.timeout(600)
def test_the_rules_of_the_page_are_pythons_in_a_thousand_cases(browser: Browser, tmp_path: Path) -> None:
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


def test_it_begins_with_what_it_is_told(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "told.html"
    save_studio(path, Shown((build("zb-h2", 3, 4).compute(), "v-min"), 3, 4))
    show(browser, path)
    assert browser.run("studio.view.runs.map((run) => run.label)") == ["zb-h2", "v-min"]
    assert browser.run("studio.shown.map((each) => each.proved)") == [True, True]
