"""Loading: choose a checkpoint that is whole, compare, then read and hand out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.checkpoint.disk.manifest import INDEX, Manifest, damages, newest_first, read_manifest
from penstock.checkpoint.disk.values import decode, same
from penstock.checkpoint.generators import restore_generators
from penstock.checkpoint.load.reading import Contents
from penstock.checkpoint.load.restoring import fit_model, fit_optimizers
from penstock.checkpoint.named_tensors import model_entries, optimizers_of
from penstock.checkpoint.processes import Processes
from penstock.checkpoint.save.collecting import Given, check_stateful, layout_of
from penstock.errors import CheckpointError, PenstockError

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

__all__ = ["Loaded", "load_into", "say"]

ALIKE = ("processes", "placement", "replicas", "replicate", "tp")  # what a process's own state depends on
logger = logging.getLogger("penstock.checkpoint")


@dataclass(frozen=True)
class Loaded:
    """What was loaded. `step` is the number that was given to `save`, so the next step to train is the one after."""

    step: int
    path: Path
    extra: Any = None
    config: Any = None
    layout: dict[str, Any] = field(default_factory=dict)
    same_layout: bool = True
    generators: str = "own"  # the random generators: each process's own, one for all, or left alone
    versions: dict[str, str] = field(default_factory=dict)


def say(problems: list[str]) -> None:
    """What was passed over, for the log."""
    for problem in problems:
        logger.warning("passed over: %s", problem)


def load_into(pipe: Pipeline, given: Given, place: Path, *, newest: bool) -> Loaded:
    """Into the pipeline and all that was given; `newest`: `place` has checkpoints, the newest whole one is taken."""
    pipe.deployment.ranks.settle()
    processes = Processes(pipe, "load()")
    path, manifest = _choose(processes, place, newest)
    contents, _ = processes.together(lambda: (Contents(path), None), path)
    restoring, _ = processes.together(
        lambda: (_restoring(pipe, given, contents, manifest.layout, processes.count), None), path
    )
    processes.together(lambda: (contents.fill(restoring.targets), None), path)
    loaded, _ = processes.together(lambda: (restoring.finish(processes, manifest), None), path)
    return loaded


def _choose(processes: Processes, place: Path, newest: bool) -> tuple[Path, Manifest]:
    def candidates() -> list[Path]:
        if not newest:
            return [place]
        whole, problems = newest_first(place)
        say(problems)
        if not whole:
            more = f"; {len(problems)} are damaged" if problems else ""
            raise CheckpointError(f"{place} has no whole checkpoint{more}", path=place)
        return [path for path, _ in whole]

    _, told = processes.together(lambda: (None, candidates() if processes.first else None), place)
    for number, path in enumerate(told[0]):
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(path)
            wrong = list(damages(path, manifest, sums=True, part=(processes.number, processes.count)))
        except CheckpointError as error:
            wrong = [str(error)]
        problems = list(dict.fromkeys(line for lines in processes.exchange(wrong) for line in lines))
        if not problems and manifest is not None:
            return path, manifest
        if number + 1 == len(told[0]):
            raise CheckpointError("\n  ".join([f"{path} is not whole:", *problems]), path=path)
        say(problems if processes.first else [])
    raise AssertionError("unreachable")


def _restoring(*arguments: Any) -> _Restoring:
    """An index whose checksum is right may still have been written by somebody else."""
    try:
        restoring = _Restoring(*arguments)
        restoring.rehearse()
        return restoring
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, PenstockError):
            raise
        path = arguments[2].path
        raise CheckpointError(f"{path / INDEX} does not say what an index says: {error!r}", path=path) from error


class _Restoring:
    """A checkpoint that fits: `targets` are to be filled, then `finish` hands out the rest."""

    def __init__(self, pipe: Pipeline, given: Given, contents: Contents, layout: Mapping[str, Any], count: int) -> None:
        self._pipe, self._given, self._contents = pipe, given, contents
        self._plains: list[dict[str, Any]] = contents.index["processes"]
        first = self._plains[0]
        self._clock = [int(first["clock"][name]) for name in ("seed", "step", "evaluations")]
        self._extra, self._generators = first["extra"], [plain["generators"] for plain in self._plains]
        self._joined = _joined(self._plains)
        here = layout_of(pipe, count)
        self._alike = all(here[name] == layout.get(name) for name in ALIKE)
        self.targets = fit_model(pipe, contents, self._joined["model"], self._alike)
        optimizers = optimizers_of(given.optimizer)
        self._fit = fit_optimizers(pipe, optimizers, contents, self._joined["optimizer"]) if optimizers else None
        if self._fit is not None:
            self.targets |= self._fit.targets
        for name in ("scheduler", "scaler", "data"):
            if getattr(given, name) is not None:
                check_stateful(getattr(given, name), name)
                if not any(name in plain for plain in self._plains):
                    raise CheckpointError(
                        f"{contents.path} was saved without {name}=; load it without {name}=", path=contents.path
                    )

    def rehearse(self) -> None:
        """Read all plain values once, before anything is changed: what cannot be read is an error now."""
        known, nothing = self._contents.tensors, torch.empty(0)

        def stand_in(key: str) -> Tensor:
            if key not in known:
                raise CheckpointError(
                    f"{self._contents.path}: the index has no tensor {key!r}", path=self._contents.path
                )
            return nothing

        for plain in self._plains:
            for value in plain.values():
                decode(value, stand_in)

    def _tensor(self, key: str) -> Tensor:
        return self.targets[key] if key in self.targets else self._contents.tensor(key)

    def finish(self, processes: Processes, manifest: Manifest) -> Loaded:
        """The optimizer, then all that has a state of its own, then the random numbers."""
        pipe, given, first = self._pipe, self._given, self._plains[0]
        _take_extra_state(pipe, self._joined["model"], self._tensor)
        pipe.state.loaded()
        pipe.zero_grad()  # gradients of other values than these
        if self._fit is not None:
            self._fit.finish(self._tensor)
        for name in ("scheduler", "scaler"):
            if getattr(given, name) is not None:
                getattr(given, name).load_state_dict(decode(first[name], self._tensor))
        if given.data is not None:
            own = self._plains[processes.number] if self._alike else {}
            found = own if "data" in own else next(plain for plain in self._plains if "data" in plain)
            given.data.load_state_dict(decode(found["data"], self._tensor))
        pipe.deployment.clock.seed, pipe.deployment.clock.step, pipe.deployment.clock.evaluations = self._clock
        return Loaded(
            step=manifest.step,
            path=self._contents.path,
            extra=decode(self._extra, self._tensor),
            config=decode(manifest.config, self._tensor),
            layout=dict(manifest.layout),
            same_layout=self._alike,
            generators=_restore_generators(self._generators, processes, self._alike, self._tensor),
            versions=dict(manifest.versions),
        )


def _joined(plains: list[dict[str, Any]]) -> dict[str, Any]:
    """What all processes said of the model and the optimizer, as one."""
    model = {name: value for plain in plains for name, value in plain.get("model", {}).items()}
    parts = [plain["optimizer"] for plain in plains if "optimizer" in plain]
    if not parts:
        return {"model": model, "optimizer": None}
    names = {part["class"] for part in parts if part["groups"]}
    return {
        "model": model,
        "optimizer": {
            "class": ", ".join(sorted(names)),
            "groups": [group for part in parts for group in part["groups"]],
            "state": {name: state for part in parts for name, state in part["state"].items()},
        },
    }


def _take_extra_state(pipe: Pipeline, saved: dict[str, Any], tensor: Any) -> None:
    wanted = {name for name, value in model_entries(pipe) if name in saved}
    if not wanted:
        return
    pipe.deployment.ranks.give_back()  # as before load_state_dict()
    for holding in pipe.deployment.holdings():
        for place, holder in holding.module.named_modules():
            name = f"{place}._extra_state" if place else "_extra_state"
            full = holding.names.get(name, name)
            if full in wanted:
                holder.set_extra_state(decode(saved[full], tensor))


def _restore_generators(saved: list[Any], processes: Processes, alike: bool, tensor: Any) -> str:
    """Each process its own where the layout is the same; else all the one state that all had, if they had one."""
    if alike:
        restore_generators(decode(saved[processes.number], tensor))
        return "own"
    states = [decode(each, tensor) for each in saved]
    if all(same(states[0], other) for other in states[1:]):
        restore_generators(states[0])
        return "one for all"
    return "left alone"
