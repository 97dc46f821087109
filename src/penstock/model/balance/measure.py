"""Forward and backward of every piece of a model, measured where it is called.

The model's own forward runs on the example with the pieces' forwards wrapped (see `patched`). Each wrapper runs the
piece on copies of its arguments several times: once warm and counting what autograd keeps, by storage, then with the
clock. So arguments are real, and nothing has to be kept for later. The whole is repeated in rounds, so that a
disturbance hits a few of a piece's times and not all of them, and medians are taken; and the clock stands still while
this thread waits for a processor. Where stages will run on a device, each piece is there while it is measured, and
nothing else is; events among the kernels have the times then, as the host only launches them.

The user's model is as before afterwards: gradients come from `torch.autograd.grad`, which writes to no `.grad` and runs
no optimizer's hooks; buffers, attributes and the random generators are put back.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.devices import mark, on_accelerator
from penstock.errors import ModelError
from penstock.model.moved import moved
from penstock.model.random_states import random_state, restore_random
from penstock.model.replay.recording.marks import Storages
from penstock.model.replay.recording.undo import patched, undone
from penstock.model.replay.recording.unit_calls import tensors_in
from penstock.model.run_kind import DRY, run_as

ROUNDS = 3
REPEATS = 3


@dataclass
class Measured:
    """What was measured at one call of a piece of the model."""

    times: list[float] = field(default_factory=list)
    saved: int = 0  # bytes that autograd keeps, beside parameters, buffers and what earlier pieces keep
    output: int = 0

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


def measure(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    order: Sequence[str],
    run: Callable[[], Any],
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
    device: torch.device | None = None,
) -> list[Measured]:
    """Run the model in rounds with `run`; the pieces in `order`, keys of `modules`, must be called in that order.

    On `device`, if one is given, or else where they are.
    """
    found = [Measured() for _ in order]
    with undone(model), _clock() as now, run_as(DRY):
        for number in range(rounds):
            ledger = _Ledger((*model.parameters(), *model.buffers())) if number == 0 else None
            clock = _Round(order, modules, found, repeats, ledger, now, device)
            with patched(dict(modules), list(dict.fromkeys(order)), clock.wrap), torch.enable_grad():
                run()
            clock.finish()
    return found


class _Ledger:
    """Which storages are counted already; a copy made here counts as what it is a copy of."""

    def __init__(self, counted: Sequence[Tensor]) -> None:
        self._storages = Storages()
        self._origin: dict[int, int] = {}
        self._counted = {self._of(tensor) for tensor in counted}

    def _of(self, tensor: Tensor) -> int:
        key = self._storages.key(tensor)
        return self._origin.get(key, key)

    def copied(self, original: Tensor, twin: Tensor) -> None:
        self._origin[self._storages.key(twin)] = self._of(original)

    def count(self, saved: Sequence[Tensor]) -> int:
        total = 0
        for tensor in saved:
            key = self._of(tensor)
            if key not in self._counted:
                self._counted.add(key)
                total += tensor.untyped_storage().nbytes()
        return total


@dataclass
class _Round:
    """The model's forward, once, with every piece measured at its call."""

    order: Sequence[str]
    modules: Mapping[str, nn.Module]
    found: list[Measured]
    repeats: int
    ledger: _Ledger | None  # Set in the round that counts bytes.
    now: Callable[[], float]
    device: torch.device | None
    number: int = 0
    inside: bool = False

    def wrap(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        trained = [parameter for parameter in self.modules[name].parameters() if parameter.requires_grad]

        def measured(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return forward(*args, **kwargs)
            if self.number >= len(self.order) or self.order[self.number] != name:
                raise self._another_path(f"{name} was called")
            piece = self.found[self.number]
            self.number += 1
            self.inside = True
            try:
                if self.device is None:
                    return self._call(piece, forward, trained, args, kwargs)
                home = next((each.device for each in trained), torch.device("cpu"))
                on_device = partial(_on, self.device, ledger=self.ledger)
                with moved(self.modules[name], on_device) as there:
                    args, kwargs = on_device((args, kwargs))
                    return _on(home, self._call(piece, forward, there, args, kwargs), self.ledger)
            finally:
                self.inside = False

        return measured

    def finish(self) -> None:
        if self.number != len(self.order):
            raise self._another_path("the forward ended")

    def _another_path(self, what: str) -> ModelError:
        due = f"{self.order[self.number]} was due" if self.number < len(self.order) else "nothing was due any more"
        return ModelError(
            f"the model cannot be measured: as call {self.number}, {what}, where {due}. Its path depends on more than "
            f"its inputs; pass balance='parameters', counts, or weights by name"
        )

    def _call(
        self, piece: Measured, forward: Callable[..., Any], trained: list[nn.Parameter], args: Any, kwargs: Any
    ) -> Any:
        state = random_state()
        output, saved, _ = self._once(forward, trained, args, kwargs, watching=True)
        if self.ledger is not None:
            piece.saved = self.ledger.count(saved)
            piece.output = sum(tensor.numel() * tensor.element_size() for tensor in _distinct(tensors_in(output)))
        result = _copies(output, self.ledger)[0]
        del output, saved
        for _ in range(self.repeats):
            restore_random(state)
            piece.times.append(self._once(forward, trained, args, kwargs, watching=False)[2])
        return result

    def _once(
        self, forward: Callable[..., Any], trained: list[nn.Parameter], args: Any, kwargs: Any, watching: bool
    ) -> tuple[Any, list[Tensor], float]:
        """Forward and backward: the output, what autograd kept (if watching) and the seconds."""
        (args, kwargs), leaves = _copies((args, kwargs), self.ledger if watching else None)
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if watching else nullcontext()
        homes = {tensor.device for tensor in (*tensors_in((args, kwargs)), *trained)}
        stop = _started(next(filter(on_accelerator, homes), None), self.now)
        with hooks:
            output = forward(*args, **kwargs)
        made = [tensor for tensor in _distinct(tensors_in(output)) if tensor.requires_grad]
        if made:
            seeds = [torch.ones_like(tensor) for tensor in made]
            torch.autograd.grad(made, [*leaves, *trained], seeds, allow_unused=True)
        return output, saved, stop()


def _copies(value: Any, ledger: _Ledger | None) -> tuple[Any, list[Tensor]]:
    """Return a copy of a nested value, cut off from its graph, and the new leaves that require a gradient.

    Copies, because a piece may work in place on what it is given, and the glue on what it returns.
    """
    made: dict[int, Tensor] = {}
    leaves: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            leaf = tensor.detach()
            if tensor.requires_grad:
                leaves.append(leaf.requires_grad_())
            made[id(tensor)] = leaf.clone()
            if ledger is not None:
                ledger.copied(tensor, made[id(tensor)])
        return made[id(tensor)]

    return pytree.tree_map_only(Tensor, copy, value), leaves


def _on(device: torch.device, value: Any, ledger: _Ledger | None) -> Any:
    """Move a nested value to a device; what had to be copied counts as what it is a copy of."""

    def moved(tensor: Tensor) -> Tensor:
        there = tensor.detach().to(device)
        if tensor.device == there.device:
            return tensor
        if ledger is not None:
            ledger.copied(tensor, there)
        return there.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, moved, value)


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _started(device: torch.device | None, now: Callable[[], float]) -> Callable[[], float]:
    """Start a stopwatch; the function that is returned stops it, and returns its seconds."""
    if device is None:
        begin = now()
        return lambda: now() - begin
    begun = mark(device)

    def stop() -> float:
        ended = mark(device)
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    return stop


@contextmanager
def _clock() -> Iterator[Callable[[], float]]:
    """Yield a clock of seconds on the wall, without those in which this thread was ready to run and had no processor.

    Linux tells them, in nanoseconds; elsewhere it is the wall's clock alone.
    """
    try:
        schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        int(os.pread(schedstat, 100, 0).split()[1])
    except (OSError, ValueError, IndexError):
        schedstat = -1

    def now() -> float:
        waited = int(os.pread(schedstat, 100, 0).split()[1]) * 1e-9 if schedstat >= 0 else 0.0
        return perf_counter() - waited

    try:
        yield now
    finally:
        if schedstat >= 0:
            os.close(schedstat)
