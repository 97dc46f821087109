"""The page in a real Chromium. Without one these tests fail: `apt-get install chromium chromium-driver`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser
from recorded import pipeline, record

from penstock.schedule import Costs, build, simulate
from penstock.view.curve import Curve
from penstock.view.page import save_page
from penstock.view.run import Run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

BAD = '</script><b id="bad">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        found.size(1300, 900)
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pages")
    curve = Curve([(step, 5 / step**0.5) for step in range(1, 900)], [(step, 5.5 / step**0.5) for step in (9, 99, 890)])
    notes = [f"This machine has 2 cores for 4 ranks {BAD}", "The timeline is of step 30."]
    one = Run("1f1b", simulate(build("1f1b", 4, 8), Costs(hop=0.25)))
    save_page([one], found / "one.html", notes=notes, curve=curve)
    with pipeline([0.001] * 4) as pipe:
        run = record(pipe)
    predicted = replace(simulate(run.schedule, Costs.from_timeline(run)), unit="s")
    save_page([Run(f"predicted {BAD}", predicted), Run("measured", run)], found / "two.html")
    save_page([Run("large", simulate(build("zb-v", 16, 1042)))], found / "large.html")
    return found


def at(browser: Browser, rank: int, place: int) -> tuple[float, float]:
    """The middle of a span, in the window."""
    return tuple(
        browser.run(
            f"""(() => {{
              const box = document.getElementById("chart").getBoundingClientRect(), {{gantt, runs}} = penstock;
              const row = runs[0].rows[{rank}], found = gantt.places.find((entry) => entry.row === row);
              const {{slope, shift}} = gantt.pixels(row.run);
              const middle = (row.start[{place}] + row.length[{place}] / 2) * slope + shift;
              return [box.left + gantt.gutter + middle, box.top + found.y + gantt.rowHeight / 2];
            }})()"""
        )
    )  # type: ignore[return-value]


def tip(browser: Browser) -> str:
    return str(browser.run('document.getElementById("tip").hidden ? "" : document.getElementById("tip").innerText'))


def window(browser: Browser) -> list[float]:
    time.sleep(0.1)
    found: list[float] = browser.run("[penstock.view.from, penstock.view.to]")
    return found


def test_notes_come_first_and_the_loss_is_drawn(browser: Browser, folder: Path) -> None:
    browser.size(1300, 900)
    browser.open(folder / "one.html")
    assert browser.run('document.querySelector("main").firstElementChild.id') == "notes"
    assert browser.run('document.querySelector("#notes li").textContent').endswith(BAD)
    assert not browser.run('document.querySelector("#bad")')
    curve = 'document.querySelector("#loss svg")'
    box = browser.run(f"(() => {{const b = {curve}.getBoundingClientRect(); return [b.width, b.height];}})()")
    assert box[0] > 600
    assert box[1] > 150
    assert "training loss from 5 in step 1" in browser.run(f'{curve}.getAttribute("aria-label")')
    assert browser.run(f'{curve}.querySelector("circle.best title").textContent').startswith("step 890: validation")
    browser.open(folder / "two.html")
    assert browser.run('getComputedStyle(document.getElementById("notes")).display') == "none"
    assert not browser.run('document.querySelector("#loss")')


@pytest.mark.parametrize("name", ["one", "two", "large"])
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (390, False)])
def test_it_loads_without_a_word_on_the_console_and_fits(
    browser: Browser, folder: Path, name: str, width: int, dark: bool
) -> None:
    browser.size(width, 900, mobile=width < 500)
    browser.dark(dark)
    browser.open(folder / f"{name}.html")
    assert browser.log() == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("getComputedStyle(document.documentElement).backgroundColor") == (
        "rgb(18, 21, 26)" if dark else "rgb(255, 255, 255)"
    )
    browser.size(1300, 900)
    browser.dark(False)


def colours(browser: Browser) -> Any:
    """Of the first row, at a quarter, half and three quarters of its width."""
    return browser.run(
        """(() => {
          const chart = document.getElementById("chart"), pen = chart.getContext("2d");
          return [0.02, 0.4, 0.7].map((share) => [...pen.getImageData(
            penstock.gantt.gutter + share * penstock.gantt.plot, 3, 1, 1).data]);
        })()"""
    )


def test_the_chart_has_the_colours_of_the_ops(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    assert colours(browser)[0] == [0x56, 0xB4, 0xE9, 255]
    assert [0xE6, 0x9F, 0x00, 255] in colours(browser)


def test_hovering_tells_the_action_its_times_and_whom_it_waited_for(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    browser.point(*at(browser, 1, 0))
    text = tip(browser)
    assert text.startswith("1F0")
    assert "forward of stage 1, microbatch 0" in text
    assert "starts at 1.25, takes 1" in text
    assert "waited 1.25 for rank 0 (0F0)" in text
    x, y = at(browser, 1, 0)
    browser.point(x - 35, y)
    assert tip(browser).startswith("fill")
    browser.point(5, 5)
    assert tip(browser) == ""


def test_zoom_and_pan_by_mouse_and_keys(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    whole = window(browser)
    x, y = at(browser, 0, 0)
    browser.wheel(x, y, -600)
    near = window(browser)
    assert near[1] - near[0] < (whole[1] - whole[0]) / 2
    assert near[0] == pytest.approx(0, abs=0.6)
    press, release = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
    aside = {"type": "pointerMove", "x": 400, "y": round(y), "duration": 50}
    browser.point(700, y, press, aside, release)
    assert window(browser)[0] > near[0]
    browser.run('document.getElementById("chart").focus()')
    browser.press("0")
    assert window(browser) == whole
    browser.press("+", "+")
    inside = window(browser)
    assert inside[1] - inside[0] == pytest.approx((whole[1] - whole[0]) / 2.25)
    browser.press("\ue014")  # right arrow
    assert window(browser)[0] > inside[0]
    browser.press("\ue012", "-")  # left arrow
    assert window(browser)[1] - window(browser)[0] == pytest.approx((whole[1] - whole[0]) / 1.5)


def test_actions_can_be_read_out_by_keys_alone(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    browser.run('document.getElementById("chart").focus()')
    assert browser.run('getComputedStyle(document.getElementById("chart")).outlineStyle') == "solid"
    browser.press("\ue015", "\ue015", ".")  # down, down, next
    text = browser.run('document.getElementById("status").textContent')
    assert text.startswith("1F1: forward of stage 1, microbatch 1; rank 1: starts at ")
    browser.press("\ue00c")  # escape
    assert browser.run("penstock.selected") is None


def test_runs_are_compared_and_a_name_stays_a_name(browser: Browser, folder: Path) -> None:
    browser.open(folder / "two.html")
    assert browser.run('document.getElementById("bad")') is None
    assert BAD in browser.run('document.getElementById("runs").innerText')
    ranks = browser.run("penstock.gantt.places.map((entry) => entry.row.run.letter + entry.row.rank)")
    assert ranks[:4] == ["A0", "B0", "A1", "B1"]
    browser.run('(() => { const order = document.getElementById("order"); order.value = "run"; '
                'order.dispatchEvent(new Event("change")); penstock.draw(); })()')  # fmt: skip
    ranks = browser.run("penstock.gantt.places.map((entry) => entry.row.run.letter + entry.row.rank)")
    assert ranks == [f"{letter}{rank}" for letter in "AB" for rank in range(4)]
    assert len(browser.run('document.getElementById("advice").innerText')) > 20
    assert "wait for rank" in browser.run('document.getElementById("books").innerText')


def test_a_hundred_thousand_spans_are_drawn_with_few_strokes(browser: Browser, folder: Path) -> None:
    """What keeps it smooth: a row with more spans than fit is one picture. How fast it is: penstock bench page."""
    browser.open(folder / "large.html")
    assert browser.run("penstock.runs[0].rows.reduce((sum, row) => sum + row.count, 0)") > 100_000
    strokes = browser.run(
        """(() => { const pen = document.getElementById("chart").getContext("2d"), found = [];
          let count = 0;
          for (const name of ["fillRect", "fillText", "drawImage", "stroke", "strokeRect"]) {
            const made = pen[name].bind(pen); pen[name] = (...given) => { count++; return made(...given); }; }
          for (let turn = 0; turn < 20; turn++) {
            count = 0; penstock.zoom(turn % 2 ? 0.7 : 1.3, 0.4); penstock.draw(); found.push(count); }
          return found; })()"""
    )
    assert 16 <= max(strokes) < 200
