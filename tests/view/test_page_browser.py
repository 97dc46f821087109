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
from tiers import by_turns

from penstock.schedule import Costs, build, simulate
from penstock.view.curve import Curve
from penstock.view.page import save_page
from penstock.view.recorded import Recorded, RecordedSteps
from penstock.view.run import Run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SEVEN = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min")
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
    one = Run("1f1b", simulate(build("1f1b", 4, 8), Costs(hop=0.25)), (2e9, 1e9, 1e9, 1e9))
    save_page([one], found / "one.html", notes=notes, curve=curve)
    with pipeline([0.001] * 4) as pipe:
        run = record(pipe)
    predicted = replace(simulate(run.schedule, Costs.from_timeline(run)), unit="s")
    save_page([Run(f"predicted {BAD}", predicted), Run("measured", run)], found / "two.html")
    save_page([Run("large", simulate(build("zb-v", 16, 1042)))], found / "large.html")
    save_page([Run("wide", simulate(build("zb-h1", 64, 64)))], found / "wide.html")
    several = [Run(name, simulate(build(name, 8, 8))) for name in SEVEN]
    steps = RecordedSteps.of([Recorded(10 * step, 1.0 + 4.0 * (step == 3), 0.1) for step in range(1, 7)])
    save_page(several, found / "seven.html", recordings=steps)
    return found


def at(browser: Browser, rank: int, place: int) -> tuple[float, float]:
    """The middle of a span, in the window."""
    browser.run('document.getElementById("chart").scrollIntoView({block: "nearest"})')
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


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    by_turns(["one", "two", "large", "seven", "wide"], [(1300, False), (1300, True), (390, False)], one_in=3),
)
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
    assert ranks == [f"{letter}{rank}" for letter in "AB" for rank in range(4)]
    browser.run('(() => { const order = document.getElementById("order"); order.value = "rank"; '
                'order.dispatchEvent(new Event("change")); penstock.draw(); })()')  # fmt: skip
    ranks = browser.run("penstock.gantt.places.map((entry) => entry.row.run.letter + entry.row.rank)")
    assert ranks[:4] == ["A0", "B0", "A1", "B1"]
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


def text_of(browser: Browser, name: str) -> str:
    return str(browser.run(f'document.getElementById("{name}").innerText'))


def test_many_runs_are_compared_first_and_their_ranks_shown_on_demand(browser: Browser, folder: Path) -> None:
    browser.open(folder / "seven.html")
    assert browser.run("penstock.gantt.places.length") == 0
    assert browser.run("penstock.gantt.minis.length") == 7
    points = browser.run('[...document.querySelectorAll("#scatter .dot")].map((dot) => dot.getAttribute("aria-label"))')
    assert points[4].startswith("E zb-v: idle ")
    assert "memory, in whole-rank microbatches 8" in points[4]
    browser.run('document.querySelectorAll("#runs button")[4].click()')
    assert window(browser)
    assert browser.run("penstock.gantt.places.map((entry) => entry.row.run.label)") == ["zb-v"] * 8
    assert browser.run('document.querySelectorAll("#runs button")[4].getAttribute("aria-expanded")') == "true"
    head = browser.run("(({heads}) => heads[1].y + 5)(penstock.gantt)")
    browser.size(1300, 3000)
    box = browser.run('(({left, top}) => [left, top])(document.getElementById("chart").getBoundingClientRect())')
    browser.point(box[0] + 30, box[1] + head, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0})
    assert window(browser)
    assert browser.run("penstock.view.isOpen(penstock.runs[1])")
    browser.size(1300, 900)


def test_memory_is_shown_in_bytes_where_they_are_known(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    assert "8 GB" in text_of(browser, "runs")
    assert text_of(browser, "memory-text").endswith("in bytes.")


def test_recorded_steps_have_a_median_a_spread_and_marked_outliers(browser: Browser, folder: Path) -> None:
    browser.open(folder / "seven.html")
    assert text_of(browser, "steps-text").startswith("Median 1 s of 6 recorded steps: half of them within 1 s and 1 s")
    assert browser.run('document.querySelectorAll("#steps .outlier").length') == 1
    assert browser.run('document.querySelectorAll("#steps .dot.chosen").length') == 1
    assert browser.run('document.querySelectorAll("#steps .level").length') == 1


def test_rows_of_sixty_four_ranks_have_names(browser: Browser, folder: Path) -> None:
    browser.open(folder / "wide.html")
    assert browser.run("penstock.gantt.rowHeight") >= 11
    drawn = browser.run(
        """(() => { const pen = document.getElementById("chart").getContext("2d"), found = [], own = pen.fillText;
          pen.fillText = (text, ...more) => { found.push(text); own.call(pen, text, ...more); }; penstock.draw();
          return found; })()"""
    )
    assert {f"rank {rank}" for rank in range(64)} <= set(drawn)


def test_a_range_is_added_up_by_kind(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    press, release = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
    browser.run('document.getElementById("chart").scrollIntoView()')
    browser.run('document.getElementById("ranges").click()')
    (x, y), (far, _) = at(browser, 0, 0), at(browser, 0, 3)
    browser.point(x, y, press, {"type": "pointerMove", "x": round(far), "y": round(y), "duration": 50}, release)
    assert window(browser)
    first, last = browser.run("[penstock.view.range.from, penstock.view.range.to]")
    assert (first, last) == (pytest.approx(0.5, abs=0.05), pytest.approx(3.5, abs=0.05))
    text = text_of(browser, "range")
    assert "F: forward" in text
    assert "idle" in text
    browser.run('document.getElementById("chart").focus()')
    browser.press("\ue00c")  # escape
    assert browser.run('document.getElementById("range").hidden')
    whole = browser.run("(() => { penstock.controls.rangeHere(); return penstock.view.range; })()")
    assert whole["to"] == pytest.approx(browser.run("penstock.view.whole"))
    share = browser.run("penstock.runs[0].idle")
    assert f"{100 * share:.1f} %" in text_of(browser, "range")


def test_an_action_is_found_and_its_arrows_are_drawn(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    browser.run('document.getElementById("chart").focus()')
    browser.press("/")
    assert browser.run("document.activeElement.id") == "wanted"
    browser.press(*"2b3", "\ue007")
    assert text_of(browser, "found") == "1 found"
    assert text_of(browser, "status").startswith("2B3: backward of stage 2, microbatch 3")
    assert browser.run('penstock.controls.find("F1")') == 4
    lines = """(() => { const pen = document.getElementById("chart").getContext("2d"), own = pen.fill; let count = 0;
      pen.fill = () => { count++; own.call(pen); }; penstock.draw(); return count; })()"""
    assert browser.run(lines) == 0
    browser.run('document.getElementById("arrows").click()')
    assert browser.run(lines) == 1  # of the chosen 0F1: its value goes to 1F1, and nothing comes to it
    browser.run("penstock.controls.nothing()")
    assert browser.run(lines) == 48  # 8 microbatches, 3 links, both ways


def test_letters_move_and_zoom_and_the_view_is_in_the_address(browser: Browser, folder: Path) -> None:
    browser.open(folder / "one.html")
    whole = window(browser)
    browser.run('document.getElementById("chart").focus()')
    browser.press("w", "w")
    near = window(browser)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2.25)
    browser.press("d")
    assert window(browser)[0] > near[0]
    browser.press("a", "s")
    assert window(browser)[1] - window(browser)[0] == pytest.approx((whole[1] - whole[0]) / 1.5)
    browser.run('document.getElementById("critical").click()')
    browser.press("\ue015")
    time.sleep(0.4)
    address, now = browser.run("location.href"), window(browser)
    browser.devtools("Page.navigate", url="about:blank")
    browser.devtools("Page.navigate", url=address)
    time.sleep(0.5)
    assert window(browser) == pytest.approx(now, abs=1e-5)
    assert browser.run("[penstock.view.critical, penstock.selected.row.rank]") == [True, 0]


def test_an_address_is_read_anew_and_garbage_in_it_is_passed_over(browser: Browser, folder: Path) -> None:
    """A place of -1 stopped the page, the last order stayed, and 4e-7 was read as two numbers."""
    browser.open(folder / "two.html")
    browser.run('location.hash = "order=rank&critical=true&t=0.0000004_0.001&open=0&at=0.1.2"')
    assert window(browser) == [pytest.approx(4e-7), pytest.approx(0.001)]
    assert browser.run("[penstock.view.order, penstock.view.critical, penstock.selected.row.rank]") == ["rank", True, 1]
    browser.run('location.hash = "at=0.1.-1&t=5_x&range=2_1&open=9.x&order=up"')
    assert window(browser)[0] == 0
    assert browser.run("[penstock.view.order, penstock.view.critical, penstock.selected, penstock.view.range]") == [
        "run",
        False,
        None,
        None,
    ]
    assert browser.log() == []


def test_a_point_of_the_scatter_opens_its_run_and_never_closes_it(browser: Browser, folder: Path) -> None:
    browser.open(folder / "seven.html")
    for _ in range(2):
        browser.run(
            'document.querySelectorAll("#scatter .dot")[4].dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}))'
        )
        assert browser.run("[...penstock.view.open]") == [4]
