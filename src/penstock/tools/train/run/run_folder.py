"""The folder of a run: where its things are, what it was started with, and whether there is something to go on from.

config.json      the configuration, every key
cut.json         layers by stage, as first measured: a run that goes on is cut alike
metrics.jsonl    one line per step
memory.json      what each process held, by kind
timeline.json    a typical recorded step;  recorded.json  what the recorded steps took;  timeline.html  the page
checkpoints/     by step
tensorboard/, wandb/  the figures for these two
logs/            the output of each rank, by attempt
incidents.jsonl  what failed, who, and from where it went on
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from penstock.checkpoint.disk.lock import Lock
from penstock.checkpoint.disk.manifest import checkpoints_in
from penstock.errors import FileError, UsageError
from penstock.reading import read_json
from penstock.rules import is_count
from penstock.tools.train.config.read import to_document
from penstock.tools.train.config.settings import TrainConfig
from penstock.writing import write_whole

OWN = (
    "config.json",
    "cut.json",
    "metrics.jsonl",
    "memory.json",
    "timeline.json",
    "recorded.json",
    "timeline.html",
    "incidents.jsonl",
    "wandb.json",
)
OWN_FOLDERS = ("checkpoints", "logs", "tensorboard", "wandb")


class RunFolder:
    """Paths of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.metrics = root / "metrics.jsonl"
        self.memory = root / "memory.json"
        self.timeline = root / "timeline.json"
        self.recorded = root / "recorded.json"
        self.page = root / "timeline.html"
        self.logs = root / "logs"
        self.incidents = root / "incidents.jsonl"

    def prepare(self, config: TrainConfig, *, resume: bool, fresh: bool, patience: float = 0.0) -> Lock:
        """Refuse to write over another run before anything starts, or clear it away where that was asked for.

        The lock that is returned keeps others out until it is freed, or its process ends. A run that has it now may
        take `patience` seconds to end.
        """
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"output is {self.root}, which is a file; name a folder")
        begun = self.root.is_dir() and any((self.root / name).exists() for name in (*OWN, *OWN_FOLDERS))
        failed_start = begun and self._is_failed_start()
        if begun and not (resume or fresh or failed_start):
            raise UsageError(
                f"{self.root} has a run already; add --resume to go on from its newest checkpoint, --fresh to remove "
                f"it and start over, or output=... to write elsewhere"
            )
        if fresh and begun and not (self._has_config() or checkpoints_in(self.checkpoints)):
            raise UsageError(
                f"{self.root} is not the folder of a run (its config.json is not of one), so --fresh removes nothing "
                f"there; choose another output, or remove by hand what is in the way"
            )
        if resume and not begun:
            raise UsageError(f"{self.root} has no run to go on from; leave --resume out to start one")
        # Whoever unpacks an archive owns the links in it, so the owner of a link does not show who wished for it.
        if links := [str(path) for name in OWN_FOLDERS if (path := self.root / name).is_symlink()]:
            raise UsageError(
                f"{', '.join(links)}: a symlink, by which a run from elsewhere would have you write and delete in "
                f"folders of yours; remove it, and set output to where the run is to be (output itself may be a link)"
            )
        lock = Lock(self.root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock.take(patience)
            if fresh or (failed_start and not resume and self._is_failed_start()):  # still, now that it is locked
                self._clear()
            self.checkpoints.mkdir(exist_ok=True)
            if not resume:
                self.keep_config(config)
        except OSError as error:
            lock.free()
            raise UsageError(
                f"output is {self.root}, where nothing can be written: {error.strerror} ({error.filename})"
            ) from None
        return lock

    def _is_failed_start(self) -> bool:
        """Return whether a run ended here before its first step: with its configuration, no figures, no checkpoint."""
        if not self._has_config():
            return False
        has_figures = self.metrics.exists() and self.metrics.stat().st_size > 0
        return not has_figures and not (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def _has_config(self) -> bool:
        """Return whether the configuration of a run is here; a config.json of a model is none."""
        try:
            return {"pipeline", "training", "output"} <= set(read_json(self.root / "config.json"))
        except OSError:
            return False

    def keep_config(self, config: TrainConfig) -> None:
        """Write down what the run is trained with from now on."""
        write_json(self.root / "config.json", to_document(config))

    def _clear(self) -> None:
        """Remove only what a run writes; anything else in the folder is somebody's."""
        for name in OWN:
            (self.root / name).unlink(missing_ok=True)
        for name in OWN_FOLDERS:
            if (self.root / name).is_dir():
                shutil.rmtree(self.root / name)

    def cut(self) -> dict[str, Any] | None:
        """Return how the model was cut when the run began, if that was measured: stages, and layers by stage."""
        place = self.root / "cut.json"
        try:
            found: dict[str, Any] = read_json(place)
        except FileNotFoundError:
            return None
        counts, stages = found.get("counts"), found.get("stages")
        good = isinstance(counts, list) and all(is_count(each) and each > 0 for each in counts)
        if not good or not is_count(stages) or len(counts or ()) != stages or len(found) > 2:
            raise self.wrong_cut("it is not what penstock train writes")
        return found

    def wrong_cut(self, why: str) -> FileError:
        """Return the error about a cut that the model cannot have."""
        return FileError(self.root / "cut.json", f"{why}; remove the file to have the model cut anew")

    def keep_cut(self, stages: int, counts: list[int]) -> None:
        write_json(self.root / "cut.json", {"stages": stages, "counts": counts})


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_whole(path, json.dumps(document, indent=2) + "\n")
