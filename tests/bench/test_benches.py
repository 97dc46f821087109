"""The benches run: each prints its tables and its document, and ends well. How fast anything is here says nothing."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiers import slow_if

COMMAND = str(Path(sysconfig.get_path("scripts")) / "penstock")


class Bench(NamedTuple):
    options: str
    titles: tuple[str, ...]  # how those of its tables begin
    column: str  # of the first table
    cells: set[Any]  # some of what is there
    goals: int


TWO = "--schedules 1f1b,zb-v"
BENCHES = {
    "backward": Bench("", ("one thread",), "stage", {"block 64, 2 x 32 tokens"}, 0),
    "balance": Bench(TWO, ("2 gloo ranks",), "balance", {"equal", "parameters", "time"}, 0),
    "calibration": Bench(
        "--schedules 1f1b,zb-v --kinds nap", ("nap: 8 layers", "nap: how large"), "for", {"1f1b", "zb-v"}, 6
    ),
    "checkpoint": Bench(
        "",
        ("4 x Linear(64, 64)",),
        "who",
        {"ours, async", "ours, sync", "torch.save", "DCP, async", "DCP, sync"},
        1,
    ),
    "composition": Bench(TWO, ("pp=2 x dp=2: transformer",), "who", {"ours", "ours, gloo", "torch"}, 6),
    "failures": Bench("", ("4 processes, one fails",), "failure", {"an error", "killed"}, 2),
    "losses": Bench("", ("2 gloo ranks, 1f1b",), "loss", {"mse", "own", "terms"}, 3),
    "overhead": Bench(
        TWO, ("Linear(8, 8), 2 gloo ranks", "one process, nothing sent"), "schedule", {"1f1b", "zb-v"}, 6
    ),
    "page": Bench("", ("a page of one run",), "spans", {1920}, 2),
    "pairs": Bench("", ("dualpipe-v, 2 ranks",), "what", {"makespan", "pairs of stages 0, 3"}, 5),
    "plan": Bench(
        "--schedules 1f1b,zb-v --widths 128 --rows 2", ("steps, predicted", "in all"), "schedule", {"1f1b", "zb-v"}, 4
    ),
    "schedules": Bench("", ("CPU seconds", "torch / ours", "goals for 8 x 32 x 2"), "who", {"ours", "torch"}, 4),
    "search": Bench("", ("searched within a cap", "steps that overlap"), "best family", {"zb-v x2"}, 0),
    "soak": Bench("", ("4 processes, sizes", "flat: the maximum"), "rank", {0, 1, 2, 3}, 4),
    "throughput": Bench(
        TWO,
        ("transformer blocks", "large messages", "ranks as threads", "4 steps that overlap"),
        "schedule",
        {"1f1b", "zb-v"},
        16,
    ),
    "transport": Bench("", ("2 processes, one message",), "how", {"ping-pong", "streamed"}, 0),
}
SLOW = ("search",)  # a short one that needs no browser; tests/test_primer.py runs another, from a wheel


def rows_printed(text: str) -> int:
    """Below the line of a table's load are its head and its rows, up to an empty line."""
    lines = [*text.splitlines(), ""]
    starts = [number for number, line in enumerate(lines) if line.startswith("(load average of this machine")]
    return sum(lines.index("", start) - start - 2 for start in starts)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=slow_if(name in SLOW)) for name in BENCHES],
)
def test_a_bench_prints_its_tables_and_has_their_rows_in_its_document(name: str, tmp_path: Path) -> None:
    told = BENCHES[name]
    command = [COMMAND, "bench", name, "--quick", "--json", *told.options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    document = json.loads(done.stdout)
    tables: list[dict[str, Any]] = document["tables"]
    assert document["bench"] == name
    assert document["options"]["quick"]
    for title, table in zip(told.titles, tables, strict=True):
        assert table["title"].startswith(title)
        assert table["title"] in done.stderr
        assert table["rows"]
    assert told.cells <= {row[told.column] for row in tables[0]["rows"]}
    assert rows_printed(done.stderr) == sum(len(table["rows"]) for table in tables)
    for goal in document["goals"]:
        value = tables[goal["table"]]["rows"][goal["row"]][goal["column"]]
        assert value == goal["value"] > 0
        assert goal["met"] == (value >= goal["limit"] if goal["at_least"] else value <= goal["limit"])
    assert len(document["goals"]) == told.goals
    assert done.stderr.count("MISSED") == sum(not goal["met"] for goal in document["goals"])


def test_every_bench_is_run_here() -> None:
    listed = subprocess.run([COMMAND, "bench", "--json"], capture_output=True, text=True, timeout=500, check=True)
    assert [entry["name"] for entry in json.loads(listed.stdout)] == list(BENCHES)
