"""Where a run's figures go besides its own file: TensorBoard, Weights & Biases, a function of the user's.

Each is opened on rank 0 only, and only where it is asked for; a missing package is named with the way to get it.
"""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path
from typing import Any

from penstock.errors import FileError, UsageError
from penstock.reading import read_json
from penstock.tools.train.config.read import to_document
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import check_sending, find_source
from penstock.writing import write_whole

Figures = dict[str, Any]


class Outlet:
    """Something that gets the figures of every step; those that were not measured are not there."""

    def write(self, step: int, figures: Figures) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close it, where it has an end: there will be no more figures."""


def open_outlets(config: TrainConfig, root: Path, start: int) -> list[Outlet]:
    """Open what the configuration asks for, for the steps after `start` of the run in `root`."""
    found: list[Outlet] = []
    if (board := _tensorboard(config.logging.tensorboard, root / "tensorboard", start)) is not None:
        found.append(_TensorBoard(board))
    if config.logging.wandb != "off":
        found.append(_WeightsAndBiases(config, root, start))
    if config.logging.callback is not None:
        found.append(_Callback(config.logging.callback))
    return found


def scalars(figures: Figures) -> dict[str, float]:
    """Return single finite numbers; a list by rank becomes one number per rank, such as `memory/rank0`."""
    found: dict[str, float] = {}
    for name, value in figures.items():
        each = {name: value}
        if isinstance(value, list):
            each = {f"{name}/rank{rank}": entry for rank, entry in enumerate(value)}
        found |= {key: one for key, one in each.items() if isinstance(one, (int, float)) and math.isfinite(one)}
    return found


class _TensorBoard(Outlet):
    def __init__(self, board: Any) -> None:
        self._board = board

    def write(self, step: int, figures: Figures) -> None:
        for name, value in scalars(figures).items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._board.close()


def _tensorboard(wanted: str, folder: Path, start: int) -> Any:
    if wanted == "off":
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter  # optional
    except ImportError:
        if wanted == "on":
            raise UsageError(
                'logging.tensorboard is "on", but TensorBoard is not installed: pip install tensorboard'
            ) from None
        return None
    return SummaryWriter(str(folder), purge_step=start + 1)


class _WeightsAndBiases(Outlet):
    """One run there for one run here, however often that is resumed: its id is in the run's folder."""

    def __init__(self, config: TrainConfig, root: Path, start: int) -> None:
        check_sending(config)
        try:
            import wandb  # optional
        except ImportError:
            raise UsageError(
                f'logging.wandb is "{config.logging.wandb}", but wandb is not installed: pip install "penstock[wandb]"'
            ) from None
        own: dict[str, Any] = {"project": "penstock", "name": root.name, "dir": str(root), "id": _run_id(root, start)}
        own |= {"resume": "allow", "config": to_document(config), "settings": {"console": "off", "silent": True}}
        own |= {**config.logging.wandb_options, "mode": config.logging.wandb}
        try:
            self._run = wandb.init(**own)
        except TypeError as error:
            raise UsageError(f"logging.wandb_options: wandb.init does not take them: {error}") from None
        except wandb.Error as error:
            raise UsageError(
                f"logging.wandb: {error}\nwith logging.wandb=offline, no account and no network are needed, and `wandb "
                f"sync` uploads the run later"
            ) from error

    def write(self, step: int, figures: Figures) -> None:
        self._run.log(scalars(figures), step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(root: Path, start: int) -> str:
    place = root / "wandb.json"
    if start:
        try:
            return str(read_json(place)["id"])
        except (FileNotFoundError, FileError, KeyError):
            pass  # this run had no such outlet until now
    made = secrets.token_hex(4)
    write_whole(place, json.dumps({"id": made}) + "\n")
    return made


class _Callback(Outlet):
    def __init__(self, text: str) -> None:
        self._text = text
        self._function = find_source("logging.callback", text)

    def write(self, step: int, figures: Figures) -> None:
        try:
            self._function({"step": step, **figures})
        except Exception as error:
            raise UsageError(
                f"logging.callback: {self._text} raised {type(error).__name__} in step {step}: {error}; catch in it "
                f"what must not end the run"
            ) from error
