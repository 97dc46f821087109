"""A run goes on with its newest checkpoint, under the configuration that it is given now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoint.checkpointer import Checkpointer
from penstock.checkpoint.load.loading import Loaded
from penstock.checkpoint.processes import Processes
from penstock.errors import CheckpointError, UsageError
from penstock.reading import check_like, read_json
from penstock.tools.train.config.read import changes, to_document
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.models.huggingface import check_base
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.steps import RunState
from penstock.tools.train.updates.optimizer import follow_config, options_of

NUMBERS = ("seed", "model", "lora", "data", "loss", "optimizer", "training")  # what losses depend on, but the layout
# What a run saves beside its tensors.
EXTRA = {
    "skips": 0,
    "base": None,
    "stopping": {"lowest": 0.0, "lowest_step": 0, "to_beat": 0.0, "waited": 0},
    "updates": 0,
}
HELD = ("model", "lora", "optimizer")  # what decides which tensors a checkpoint holds


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on, and what was saved beside its tensors."""

    step: int = 0
    path: Path | None = None  # The checkpoint's folder.
    extra: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # keys that were changed since


def resume(given: TrainConfig, state: RunState, checkpointer: Checkpointer) -> Resumed:
    """Load the newest whole checkpoint, if there is one. `given` is the configuration as it was asked for."""
    processes = Processes(state.pipe, "load()")
    _, found = processes.on_all(lambda: (None, processes.first and checkpointer.latest() is not None))
    if not found[0]:  # The first process decides: another may see a shared folder late.
        return Resumed()
    options = options_of(state.optimizer)
    loaded = _load(given, state, checkpointer)
    check_base(state.config, loaded.extra.get("base"))
    follow_config(state.config, state.optimizer, state.rate, options)
    if state.average is not None:
        state.average.begin(loaded.averages)
    return Resumed(loaded.step, loaded.path, loaded.extra, _changed(loaded.config, state.config, NUMBERS))


def extra_of(loaded: Loaded) -> dict[str, Any]:
    """Return what a run has saved beside its tensors; FileError where that is something else."""
    check_like(loaded.extra, EXTRA, loaded.path, "extra")
    found: dict[str, Any] = loaded.extra
    return found


def _load(given: TrainConfig, state: RunState, checkpointer: Checkpointer) -> Loaded:
    try:
        loaded = checkpointer.load(state.pipe, state.optimizer, **state.saved)
    except CheckpointError as error:  # A damaged checkpoint would have been passed over.
        changed = changed_since(RunFolder(Path(given.output)), given)
        keys = f"\nchanged since that checkpoint: {', '.join(changed)}" if changed else ""
        raise UsageError(
            f"{error}{keys}\nto resume, the configuration must have the same model, adapters, optimizer and precision; "
            f"--fresh starts over"
        ) from error
    if not isinstance(loaded.config, dict) or "skips" not in extra_of(loaded):
        raise UsageError(
            f"{loaded.path} was not saved by penstock train: it has no configuration or no count of skipped steps; "
            f"choose another output, or start over with --fresh"
        )
    return loaded


def changed_since(folder: RunFolder, config: TrainConfig) -> list[str]:
    """Describe the keys that decide what a checkpoint holds, and that have changed since the run was last started."""
    try:
        before = read_json(folder.root / "config.json")
    except OSError:
        return []
    return _changed(before, config, HELD)


def _changed(before: dict[str, Any], config: TrainConfig, names: Sequence[str]) -> list[str]:
    after = to_document(config)
    return [words for name in names for words in changes(before.get(name), after[name], name)]
