"""How fast the page of a large run is up, and drawn again at every zoom; and the studio, at every change.

    penstock bench page            100,000 spans; needs chromium (Debian: apt-get install chromium)
    penstock bench page --quick    a small run: only shows that it runs

A headless Chromium without a graphics card opens the page in a window of 1300 x 900 and zooms in and out 20 times.
`up` is from the start of loading to the first drawing; a redraw ends when its pixels can be read. The studio has two
schedules of 8 ranks and 32 microbatches, and changes a cost 20 times: both are proved, priced, bounded and drawn.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import Column, Goal, bench

from penstock.schedule import build, simulate
from penstock.view.page import save_page
from penstock.view.run import Run
from penstock.view.studio import Shown, save_studio

UP_SECONDS, REDRAW_MILLISECONDS = 5.0, 50.0
ZOOM = "penstock.zoom(turn % 2 ? 0.7 : 1.3, 0.4); penstock.draw();"
CHANGE = "studio.state.hop = 0.01 * turn; studio.update();"
MEASURE = """<script>addEventListener("load", () => {
  const up = performance.now() / 1000, redraws = [];
  for (let turn = -5; turn < 20; turn++) { // the first few warm up
    const begin = performance.now();
    ACT
    document.getElementById("chart").getContext("2d").getImageData(0, 0, 1, 1);
    if (turn >= 0) redraws.push(performance.now() - begin);
  }
  document.title = "measured " + JSON.stringify([up, redraws]);
});</script>"""
COLUMNS = [
    Column("page", 22),
    Column("spans", 10),
    Column("megabytes", 10, "{:.2f}"),
    Column("up s", 18, "{:.2f}"),
    Column("redraw ms", 18, "{:.1f}"),
]


def measured(chromium: str, path: Path, act: str) -> tuple[float, list[float]]:
    """Seconds until the page is up, and milliseconds of each redraw after `act`."""
    script = MEASURE.replace("ACT", act)
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", f"{script}</body>"), encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900"]
    profile = f"--user-data-dir={path.with_suffix('.profile')}"
    done = subprocess.run([*command, profile, "--dump-dom", path.as_uri()], capture_output=True, text=True)
    found = re.search(r"<title>measured (.*?)</title>", done.stdout, re.DOTALL)
    if found is None:
        sys.exit(f"chromium ended with {done.returncode} and drew nothing:\n{done.stderr[-2000:]}")
    up, redraws = json.loads(found[1])
    return float(up), redraws


def main() -> None:
    with bench(__doc__) as settings, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if chromium is None:
            sys.exit("the bench page needs chromium; on Debian: apt-get install chromium")
        timeline = simulate(build("zb-v", 16, 20 if settings.quick else 1042))
        path = Path(folder) / "large.html"
        save_page([Run("large", timeline)], path)
        studio = Path(folder) / "studio.html"
        save_studio(studio, Shown(("1f1b", "zb-v"), 8, 8 if settings.quick else 32))
        table = settings.report.table(0, "pages in a headless Chromium", COLUMNS)
        both = sum(len(simulate(build(name, 8, 32)).spans) for name in ("1f1b", "zb-v"))
        for name, page, spans, act in (
            ("one large run", path, len(timeline.spans), ZOOM),
            ("studio, 8 x 32", studio, both, CHANGE),
        ):
            megabytes = page.stat().st_size / 1e6
            up, redraws = measured(chromium, page, act)
            redraw = Goal(statistics.median(redraws), REDRAW_MILLISECONDS)
            table.row(name, spans, megabytes, Goal(up, UP_SECONDS), redraw)


if __name__ == "__main__":
    main()
