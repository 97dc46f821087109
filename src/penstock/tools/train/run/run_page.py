"""The page of a run, written at its end: a typical step beside what its own costs predict, and the loss by step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.reading import read_json
from penstock.schedule import Costs, Timeline, simulate
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.recordings import recorded_notes, recorded_steps
from penstock.tools.train.run.run_folder import RunFolder
from penstock.view.curve import Curve
from penstock.view.page import page
from penstock.view.run import Run, held_peaks
from penstock.writing import write_whole


def save_run_page(folder: RunFolder) -> Path | None:
    """Write the page of the run in a folder; None where no step was recorded."""
    if not folder.timeline.exists():
        return None
    timeline = Timeline.load(folder.timeline)
    planned = replace(simulate(timeline.schedule, Costs.from_timeline(timeline)), unit="s")
    steps = recorded_steps(folder)
    name = "recorded" if steps is None else f"step {steps.shown}"
    held = _activation(folder, timeline)
    runs = [Run(name, timeline, held), Run("as planned with its costs", planned, held)]
    lines = read_metrics(folder.metrics)
    notes = [*recorded_notes(folder), *_figures(lines)]
    title = f"{folder.root.name}: a typical step"
    write_whole(folder.page, page(runs, title, notes=notes, curve=_curve(lines), recordings=steps))
    return folder.page


def _activation(folder: RunFolder, timeline: Timeline) -> tuple[float, ...] | None:
    """Return the bytes that a microbatch holds on each rank: those of the measured peak, by what was held then."""
    try:
        measured = [row["activations"] for row in read_json(folder.memory, list)]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    held = held_peaks(timeline)
    known = len(measured) == len(held) and all(isinstance(size, (int, float)) and size > 0 for size in measured)
    return tuple(size / peak for size, peak in zip(measured, held, strict=True)) if known and all(held) else None


def _curve(lines: Sequence[dict[str, Any]]) -> Curve:
    def points(name: str) -> list[tuple[int, float]]:
        return [(line["step"], line[name]) for line in lines if isinstance(line.get(name), (int, float))]

    return Curve(points("loss"), points("validation"))


def _figures(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Summarise the figures of the whole run in one sentence."""
    if not lines:
        return []
    last = lines[-1]
    parts = [f"{last['step']:,} steps"]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    if speeds:
        parts.append(f"{statistics.median(speeds):,.0f} tokens/s (median)")
    used = [line["mfu"] for line in lines if "mfu" in line]
    if used:
        parts.append(f"{statistics.median(used):.1%} of the devices' peak (MFU)")
    if last.get("memory"):
        held = ", ".join(f"{each / 1e6:,.0f}" for each in last["memory"])
        parts.append(f"memory by process {held} MB")
    return [f"The run: {'; '.join(parts)}."]
