"""The end of a run: its last lines, what can be done with its results, and its page."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.disk.manifest import BEST, best_of, newest_first
from penstock.reading import read_json, read_text
from penstock.rules import is_float
from penstock.schedule import Costs, Timeline, simulate
from penstock.tools.train.config.paths import holds_rows
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE
from penstock.tools.train.generation.codec import reads_bytes, tokenizer_path
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.progress import of_time
from penstock.tools.train.run.recordings import recorded_notes, recorded_steps
from penstock.tools.train.run.run_folder import RunFolder
from penstock.view.curve import Curve
from penstock.view.page import page
from penstock.view.run import Run, held_peaks
from penstock.writing import write_whole

if TYPE_CHECKING:
    from penstock.tools.train.loop import Ending


def closing_words(
    config: TrainConfig, folder: RunFolder, ending: Ending, checkpoint: Path | None, seconds: float, resume: str
) -> str:
    """Return the last lines of a run; `resume` is the command that resumes it."""
    saved = save_run_page(folder)
    numbers = f"loss {ending.loss:.4f}" if ending.loss is not None else "nothing left to do"
    if ending.validation is not None:
        numbers += f", validation {ending.validation:.4f}"
    head = "stopped" if ending.stopped else "done"
    lines = ["", f"{head}: step {ending.step}, {numbers}, {of_time(seconds)}"]
    if ending.early:
        lines.append(f"ended early: {ending.early}")
    lines.append(f"checkpoint  {_as_output(checkpoint, folder)}")
    best = best_of(newest_first(folder.checkpoints)[0])
    if best is not None:
        lines.append(f"best        {_as_output(best, folder)} ({folder.root}/{BEST} names it)")
    lines.append(f"metrics     {folder.metrics}")
    if saved is not None:
        lines.append(f"timeline    {saved}")
    if ending.stopped:
        lines.append(f"go on       {resume}")
    else:
        lines += what_next(config, folder.root)
    return "\n".join(lines)


def _as_output(path: Path | None, folder: RunFolder) -> str:
    """Write a path in the folder of the run, relative where `output` is."""
    return str(path) if path is None or folder.root.is_absolute() else os.path.relpath(path)


def what_next(config: TrainConfig, root: Path) -> Iterator[str]:
    """Yield the commands that make something of a run that is complete."""
    huggingface = config.model.source.startswith(HUGGINGFACE)
    run = shlex.quote(str(root))
    folder = config.model.source.removeprefix(HUGGINGFACE) if huggingface else ""
    if (config.model.source == "gpt" or huggingface) and (tokenizer_path(config, folder) or reads_bytes(config)):
        prompt = "--chat 'your question'" if _learns_chats(config) else "--prompt 'def '"
        yield f"try it      penstock generate {run} {prompt}"
    if huggingface:
        yield f"export      penstock checkpoint export {run} FOLDER"


def _learns_chats(config: TrainConfig) -> bool:
    """Return whether rows are, or may be, chats: the tokenizer has a template for them."""
    data = config.data
    if not data.tokenizer or not holds_rows(data) or data.format not in ("auto", "messages"):
        return False
    folder = Path(data.tokenizer).expanduser()
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        settings.is_file() and '"chat_template"' in read_text(settings)
    )


def save_run_page(folder: RunFolder) -> Path | None:
    """Write the page of the run in a folder; None where no step was recorded."""
    if not folder.timeline.exists():
        return None
    timeline = Timeline.load(folder.timeline)
    planned = replace(simulate(timeline.schedule, Costs.from_timeline(timeline)), unit="s")
    steps, held, lines = recorded_steps(folder), _activation(folder, timeline), read_metrics(folder.metrics)
    name = "recorded" if steps is None else f"step {steps.shown}"
    runs = [Run(name, timeline, held), Run("as planned with its costs", planned, held)]
    notes, title = [*recorded_notes(folder), *_figures(lines)], f"{folder.root.name}: a typical step"
    write_whole(folder.page, page(runs, title, notes=notes, curve=_curve(lines), recordings=steps))
    return folder.page


def _activation(folder: RunFolder, timeline: Timeline) -> tuple[float, ...] | None:
    """Return the bytes that a microbatch holds on each rank: those of the measured peak, by what was held then."""
    try:
        measured = [row["activations"] for row in read_json(folder.memory, list)]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    held = held_peaks(timeline)
    known = len(measured) == len(held) and all(is_float(size) and size > 0 for size in measured)
    return tuple(size / peak for size, peak in zip(measured, held, strict=True)) if known and all(held) else None


def _curve(lines: Sequence[dict[str, Any]]) -> Curve:
    def points(name: str) -> list[tuple[int, float]]:
        return [(line["step"], line[name]) for line in lines if is_float(line.get(name))]

    return Curve(points("loss"), points("validation"))


def _numbers(lines: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if is_float(line.get(name))]


def _figures(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Summarise the figures of the whole run in one sentence."""
    if not lines:
        return []
    last = lines[-1]
    parts = [f"{last['step']:,} steps"]
    speeds, used = _numbers(lines, "tokens_per_second"), _numbers(lines, "mfu")
    if speeds:
        parts.append(f"{statistics.median(speeds):,.0f} tokens/s (median)")
    if used:
        parts.append(f"{statistics.median(used):.1%} of the devices' peak (MFU)")
    if isinstance(last.get("memory"), list):
        held = ", ".join(f"{each / 1e6:,.0f}" for each in last["memory"])
        parts.append(f"memory by process {held} MB")
    return [f"The run: {'; '.join(parts)}."]
