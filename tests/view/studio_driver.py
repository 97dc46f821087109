"""The studio as a user has it: loaded with an address, read, pressed and pointed at."""

from __future__ import annotations

import time
from pathlib import Path

from chromium import Browser


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
