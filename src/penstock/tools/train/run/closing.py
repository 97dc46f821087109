"""The last lines of a run: what came of it, where its results are, and what can be done with them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.disk.manifest import BEST, best_of, newest_first
from penstock.reading import read_text
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE
from penstock.tools.train.data.paths import holds_rows
from penstock.tools.train.generation.codec import reads_bytes, tokenizer_path
from penstock.tools.train.run.progress import of_time
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.run.run_page import save_run_page

if TYPE_CHECKING:
    from penstock.tools.train.loop import Ending


def closing_words(
    config: TrainConfig, folder: RunFolder, ending: Ending, checkpoint: Path | None, seconds: float, resume: str
) -> str:
    """Return the last lines of a run; `resume` is the command that resumes it."""
    page = save_run_page(folder)
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
    if page is not None:
        lines.append(f"timeline    {page}")
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
