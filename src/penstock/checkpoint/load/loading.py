"""Loading: choose a checkpoint that is whole, compare, then read and hand out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.checkpoint.disk.manifest import INDEX, Manifest, damages, newest_first, read_manifest
from penstock.checkpoint.generators import check_states, restore_generators
from penstock.checkpoint.load.reading import CheckpointContents
from penstock.checkpoint.load.restoring import OptimizerFit, fit_averages, fit_model
from penstock.checkpoint.named_tensors import Given, check_stateful, layout_of, model_entries, optimizers_of
from penstock.checkpoint.processes import Processes
from penstock.errors import CheckpointError, PenstockError
from penstock.reading import check_like
from penstock.runtime.messages.plain import decode, same

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

WRONG = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)  # what forged values cause
PARTS = ("scheduler", "scaler", "data")  # These keep a state of their own.
ALIKE = ("processes", "placement", "replicas", "replicate", "tp")  # what a process's own state depends on
logger = logging.getLogger("penstock.checkpoint")


@dataclass(frozen=True)
class Loaded:
    """What was loaded from a checkpoint.

    Attributes:
        step: The number that was given to `save`; the next step to train is the one after.
        path: The checkpoint's folder.
        extra: What was saved as `extra`.
        config: What was saved as `config`.
        layout: The layout of the run that saved it: processes, placement, replicas.
        same_layout: Whether that is the layout of this run. If so, the run continues bit for bit.
        generators: What happened to the random generators: `"own"` (each process got its own back), `"one for all"`
            (all had the same, and have it again) or `"left alone"`.
        versions: The versions of Penstock, torch and Python that saved it.
        averages: The names of this process's `averages` that were in it, and are filled.
    """

    step: int
    path: Path
    extra: Any = None
    config: Any = None
    layout: dict[str, Any] = field(default_factory=dict)
    same_layout: bool = True
    generators: str = "own"  # the random generators: each process's own, one for all, or left alone
    versions: dict[str, str] = field(default_factory=dict)
    averages: frozenset[str] = frozenset()


class SkippedLog:
    """What was passed over, for the log: each once, and by the first process only, as all see the same folder."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, problems: Iterable[str]) -> None:
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return
        for problem in problems:
            if problem not in self._told:
                self._told.add(problem)
                logger.warning("skipped: %s", problem)


def load_into(pipe: Pipeline, given: Given, place: Path, log_skipped: SkippedLog, *, newest: bool) -> Loaded:
    """Load into the pipeline and all that was given; with `newest`, the newest whole checkpoint that `place` has."""
    pipe.deployment.ranks.wait_for_late_ranks()
    processes = Processes(pipe, "load()")
    path, manifest = _choose(processes, place, newest, log_skipped)
    contents, _ = processes.on_all(lambda: (CheckpointContents(path), None), path)
    restoring, _ = processes.on_all(lambda: (_restoring(pipe, given, contents, manifest, processes), None), path)
    try:
        processes.on_all(restoring.hand_out, path)
    except PenstockError:
        restoring.take_back()
        raise
    processes.on_all(lambda: (contents.fill(restoring.targets), None), path)
    loaded, _ = processes.on_all(lambda: (restoring.finish(), None), path)
    return loaded


def _choose(processes: Processes, place: Path, newest: bool, log_skipped: SkippedLog) -> tuple[Path, Manifest]:
    def candidates() -> list[Path]:
        if not newest:
            return [place]
        whole, problems = newest_first(place)
        log_skipped(problems)
        if not whole:
            more = f"; {len(problems)} are damaged" if problems else ""
            raise CheckpointError(f"{place} has no complete checkpoint{more}", path=place)
        return [path for path, _ in whole]

    _, answers = processes.on_all(lambda: (None, candidates() if processes.first else None), place)
    for number, path in enumerate(answers[0]):
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(path)
            wrong = list(damages(path, manifest, sums=True, part=(processes.number, processes.count)))
        except CheckpointError as error:
            wrong = [str(error)]
        problems = list(dict.fromkeys(line for lines in processes.exchange(wrong) for line in lines))
        if not problems and manifest is not None:
            return path, manifest
        if number + 1 == len(answers[0]):
            raise CheckpointError("\n  ".join([f"{path} is not complete:", *problems]), path=path)
        log_skipped(problems)
    raise AssertionError("unreachable")


def _restoring(*arguments: Any) -> _Restoring:
    """Surround loading: an index whose checksum is right may still have been written by somebody else."""
    try:
        restoring = _Restoring(*arguments)
        restoring.rehearse()
        return restoring
    except WRONG as error:
        if isinstance(error, PenstockError):
            raise
        path = arguments[2].path
        raise CheckpointError(f"{path / INDEX} is not a valid index: {str(error)[:200]}", path=path) from error


class _Restoring:
    """A checkpoint that fits. What may refuse its state gets it first; then `targets` are filled; then `finish`."""

    def __init__(
        self, pipe: Pipeline, given: Given, contents: CheckpointContents, manifest: Manifest, processes: Processes
    ) -> None:
        self._pipe, self._contents = pipe, contents
        self._manifest, self._processes = manifest, processes
        # Pairs of an object with a new state, and its state of before.
        self._before: list[tuple[Any, Any]] = []
        self._plains: list[dict[str, Any]] = contents.index["processes"]
        first = self._plains[0]
        clock = [first["clock"][name] for name in ("seed", "step", "evaluations")]
        check_like(clock, [0], contents.path / INDEX, "clock")
        self._clock = [int(each) for each in clock]
        self._extra = first["extra"]
        self._joined = _joined(self._plains)
        here = layout_of(pipe, processes.count)
        self._alike = all(here[name] == manifest.layout.get(name) for name in ALIKE)
        self.targets = fit_model(pipe, contents, self._joined["model"], self._alike, given.leave_out)
        optimizers = optimizers_of(given.optimizer)
        self._fit = OptimizerFit(pipe, optimizers, contents, self._joined["optimizer"]) if optimizers else None
        if self._fit is not None:
            self.targets |= self._fit.targets
        averages = fit_averages(pipe, contents, given.averages or {})
        self._averages = frozenset(averages)
        self.targets |= dict(averages.values())
        self._parts = {name: getattr(given, name) for name in PARTS if getattr(given, name) is not None}
        for name, part in self._parts.items():
            check_stateful(part, name)
            if not any(name in plain for plain in self._plains):
                raise CheckpointError(
                    f"{contents.path} was saved without {name}=; load it without {name}=", path=contents.path
                )

    def rehearse(self) -> None:
        """Read all plain values once, before anything is changed: what cannot be read is an error now."""
        most, nothing = self._contents.bytes, torch.empty(0, device="cpu")
        asked = 0

        def stand_in(key: str) -> Tensor:
            nonlocal asked
            asked += self._contents.bytes_of(key)
            if asked > most:
                raise ValueError(f"the values of one process name tensors of {asked} bytes; the files have {most}")
            return nothing

        for plain in (*self._plains, {"config": self._manifest.config}):
            asked = 0
            for value in plain.values():
                decode(value, stand_in)
        self._generators, self._whose = self._states()
        if self._generators is not None:
            check_states(self._generators)

    def _states(self) -> tuple[Any, str]:
        """Return the generators' states: each process its own where the layout is the same; else one that all had, if
        any.
        """
        saved = [plain["generators"] for plain in self._plains]
        if self._alike:
            return decode(saved[self._processes.number], self._contents.tensor), "own"
        states = [decode(each, self._contents.tensor) for each in saved]
        if all(same(states[0], other) for other in states[1:]):
            return states[0], "one for all"
        return None, "left alone"

    def _tensor(self, key: str) -> Tensor:
        return self.targets[key] if key in self.targets else self._contents.tensor(key)

    def hand_out(self) -> tuple[None, None]:
        """Hand states to the scheduler, the scaler and the data: code of others, which may refuse what it is given."""
        own = self._plains[self._processes.number] if self._alike else {}
        for name, part in self._parts.items():
            plains = [own, *self._plains] if name == "data" else self._plains
            state = decode(next(plain[name] for plain in plains if name in plain), self._contents.tensor)
            before = copy.deepcopy(part.state_dict())
            self._before.append((part, before))
            try:
                if name == "scheduler":  # Those of torch take any name as one of their own, which may be a method's.
                    check_like(state, before, name)
                    if odd := [key for key in state if key not in before and hasattr(part, key)]:
                        raise ValueError(f"{odd[0][:40]!r} is no part of its state")
                part.load_state_dict(state)
            except WRONG as error:
                raise CheckpointError(
                    f"{self._contents.path}: {name}= does not accept the state that was saved: {error!r}",
                    path=self._contents.path,
                ) from error
        return None, None

    def take_back(self) -> None:
        for part, state in self._before:
            part.load_state_dict(state)

    def finish(self) -> Loaded:
        """Load the extra state of modules, the optimizer, then random numbers and the count of steps."""
        pipe, manifest = self._pipe, self._manifest
        _take_extra_state(pipe, self._joined["model"], self._tensor)
        pipe.state.loaded()
        pipe.zero_grad()  # gradients of other values than these
        if self._fit is not None:
            self._fit.finish(self._tensor)
        if self._generators is not None:
            restore_generators(self._generators)
        clock = pipe.deployment.counter
        clock.seed, clock.step, clock.evaluations = self._clock
        clock.is_apart = False
        return Loaded(
            step=manifest.step,
            path=self._contents.path,
            extra=decode(self._extra, self._tensor),
            config=decode(manifest.config, self._tensor),
            layout=dict(manifest.layout),
            same_layout=self._alike,
            generators=self._whose,
            versions=dict(manifest.versions),
            averages=self._averages,
        )


def _joined(plains: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what all processes reported of the model and the optimizer."""
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
    pipe.deployment.ranks.give_back()  # A call of load_state_dict() does the same first.
    for holding in pipe.deployment.holdings():
        for place, holder in holding.module.named_modules():
            name = f"{place}._extra_state" if place else "_extra_state"
            full = holding.names.get(name, name)
            if full in wanted:
                try:
                    holder.set_extra_state(decode(saved[full], tensor))
                except WRONG as error:
                    raise CheckpointError(f"{full} is not accepted by the model: {error!r}") from error
