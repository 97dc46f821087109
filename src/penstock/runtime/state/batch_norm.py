"""Batch norms whose running statistics see a batch once, however many microbatches it goes through in.

A plain batch norm in a pipeline updates its running statistics once per microbatch, from that microbatch: `momentum`
acts many times a batch, and the variance is that within microbatches, without what lies between their means. A
deferred one still normalises each microbatch by its own statistics, but only notes them. When the batch is through,
the notes are pooled (counts, means and squared deviations, in double precision: never the mean of variances, nor the
difference of two large numbers) and the running statistics are updated once, as if it had gone through in one piece.

An exact one normalises by the statistics of the whole batch. That needs the batch in one piece: its stage takes it so
(`schedule.lowering.gather`), and layer and numbers are those of the plain model.

A layer is converted by a change of its class alone. It stays the same object with the same names, parameters, buffers
and hooks, and outside of a pipeline it is the plain layer. Nothing is kept in it: the notes belong to the stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.devices import widest
from penstock.errors import ModelError, UsageError
from penstock.model.part import StagePart
from penstock.model.run_kind import DRY, run_kind
from penstock.runtime.state.phase import NOW, Phase
from penstock.runtime.state.replica_batch_norm import ReplicaGroup, over_replicas, track

BATCH_NORMS = ("microbatch", "deferred", "exact")


class Converted(_BatchNorm):
    """What a converted layer has before the class that it had: `class DeferredBatchNorm2d(Deferred, BatchNorm2d)`."""

    plain: type[_BatchNorm]
    kind: type[Converted]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Its class is made as it is needed, so that a copy has to make it too."""
        return _made, (self.kind, self.plain), self.__getstate__()  # type: ignore[no-untyped-call]


class Deferred(Converted):
    """Running statistics once per batch."""

    def forward(self, input: Tensor) -> Tensor:
        """As ever, but for running statistics while a pipeline computes: these are noted, or left alone."""
        phase = NOW.phase
        if phase is None or phase.statistics is None or not self.training or not self.track_running_stats:
            return super().forward(input)
        if run_kind() == DRY:
            return super().forward(input)
        if self.running_mean is None or self.running_var is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        # from zero and with a momentum of 1, the kernel leaves the microbatch's own statistics there, for nothing
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        try:
            output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        except ValueError as error:
            error.add_note(
                "a microbatch of a single row has no variance: use fewer microbatches, or "
                "BatchOptions(batch_norm='exact'), which normalises the batch as a whole"
            )
            raise
        if phase.kind in ("forward", "checkpointing"):
            phase.statistics.note(self, phase, input.numel() // input.shape[1], mean, variance)
        return output


class Exact(Converted):
    """Normalised by the whole batch, which its stage takes in one piece; with a group, by the batch of all replicas."""

    def forward(self, input: Tensor) -> Tensor:
        """As ever, on what is the whole batch."""
        group = self.__dict__.get("group")
        normalises = self.training or self.running_mean is None
        if group is None or not normalises or run_kind() == DRY:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return over_replicas(self, input, group.group)

    @property
    def gathers(self) -> bool:
        """Whether it needs the whole batch, in the mode in which it is."""
        return self.training or self.running_mean is None


Note = tuple[int, Tensor, Tensor]  # values a channel, mean, unbiased variance


class Statistics:
    """What the deferred layers of one stage have noted of the batch that runs."""

    def __init__(self) -> None:
        self._notes: dict[tuple[int, int], tuple[Deferred, dict[int, Note]]] = {}  # by layer and number of its call

    @classmethod
    def of(cls, module: nn.Module) -> Statistics | None:
        """None where there is nothing to note."""
        return cls() if any(isinstance(layer, Deferred) for layer in module.modules()) else None

    def note(self, layer: Deferred, phase: Phase, count: int, mean: Tensor, variance: Tensor) -> None:
        """One call. Layers go by their table of buffers, which a stage's own copy of a layer shares with it."""
        key = id(layer._buffers)
        call = phase.calls[key] = phase.calls.get(key, 0) + 1
        self._notes.setdefault((key, call), (layer, {}))[1][phase.microbatch] = (count, mean, variance)

    def commit(self) -> None:
        """The batch is through: update the running statistics, once for each time that a layer was called in it."""
        notes, self._notes = self._notes, {}
        for key in sorted(notes, key=lambda each: each[1]):
            layer, by_microbatch = notes[key]
            update_statistics(layer, [by_microbatch[number] for number in sorted(by_microbatch)])

    def discard(self) -> None:
        """The batch failed."""
        self._notes = {}


def update_statistics(layer: _BatchNorm, notes: list[Note]) -> None:
    """Take a batch that went through in pieces into the running statistics, as if it had been one."""
    assert layer.running_mean is not None
    device = layer.running_mean.device
    wide = widest(device.type)
    counts = torch.tensor([count for count, _, _ in notes], dtype=wide, device=device)
    means = torch.stack([mean for _, mean, _ in notes]).to(wide)
    variances = torch.stack([variance for _, _, variance in notes]).to(wide)
    total, weights = counts.sum(), counts.unsqueeze(1)
    mean = (weights * means).sum(0) / total
    deviations = ((weights - 1) * variances + weights * (means - mean) ** 2).sum(0)
    track(layer, mean, deviations / (total - 1))


# ---------------------------------------------------------------------------------------------------------------------
# Conversion, and back


def batch_norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """All batch norms of a model, by name."""
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            yield name, layer


def _check_known(name: str, layer: _BatchNorm) -> None:
    """Refuse a layer that computes in a way of its own, or does not know its sizes yet."""
    if type(layer).forward not in (_BatchNorm.forward, Deferred.forward, Exact.forward) or "forward" in vars(layer):
        raise ModelError(
            f"{name or 'the model'} is a {type(layer).__name__}, which has a forward of its own: how it uses its "
            f"running statistics is not known; use nn.BatchNorm1d, 2d or 3d, or leave batch_norm= out"
        )
    if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():
        raise ModelError(f"{name or 'the model'} is a {type(layer).__name__} that has seen no input yet; call it once")


def _convert(model: nn.Module, kind: type[Converted]) -> list[_BatchNorm]:
    found = list(batch_norms(model))
    for name, layer in found:
        _check_known(name, layer)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and module.original_name.startswith("BatchNorm"):
            raise ModelError(f"{name} is scripted and stays as it is; leave batch_norm= out, or script it afterwards")
    restore_batch_norm(model)
    for _, layer in found:
        layer.__class__ = _class_for(kind, type(layer))
    return [layer for _, layer in found]


def defer_batch_norm(model: nn.Module) -> nn.Module:
    """Convert all batch norm layers of a model, in place, so that their running statistics follow whole batches.

    Args:
        model: The model, which is also returned.
    """
    _convert(model, Deferred)
    return model


def exact_batch_norm(model: nn.Module, group: Any = None) -> nn.Module:
    """Convert all batch norm layers of a model, in place, so that they normalise over whole batches.

    Args:
        model: The model, which is also returned.
        group: A process group of replicas of the stage, whose batches then count as one.
    """
    for layer in _convert(model, Exact):
        if group is not None:
            layer.__dict__["group"] = ReplicaGroup(group)
    return model


def restore_batch_norm(model: nn.Module) -> nn.Module:
    """Turn converted batch norm layers back into what they were, in place.

    Args:
        model: The model, which is also returned.
    """
    for _, layer in batch_norms(model):
        if isinstance(layer, Converted):
            layer.__dict__.pop("group", None)
            layer.__class__ = layer.plain  # type: ignore[assignment]
    return model


def warn_of_microbatches(model: nn.Module | Sequence[nn.Module], microbatches: int | None) -> None:
    """Warn of batch norms that see microbatches where a plain training loop would give them the batch."""
    modules = [model] if isinstance(model, nn.Module) else model
    found = [
        name or type(layer).__name__
        for module in modules
        for name, layer in batch_norms(module)
        if not isinstance(layer, Converted) and (layer.training or not module.training)
    ]
    if found and microbatches != 1:
        names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        warnings.warn(
            f"{len(found)} batch norm layers ({names}) see one microbatch at a time: they normalise by it, and their "
            f"running statistics move once for each, unlike in a training loop on whole batches. Pass batch_options="
            f"BatchOptions(batch_norm='exact') with schedule='gpipe' for the results of that loop, 'deferred' for its "
            f"running statistics alone, or 'microbatch' if this is what you want",
            stacklevel=3,
        )


def prepare_batch_norm(model: nn.Module | Sequence[nn.Module], how: str | None, group: Any = None) -> None:
    """What `batch_norm=` asks for, done to a model or a list of stages."""
    if group is not None and how != "exact":
        raise UsageError(f"batch_norm_group= is for batch_norm='exact', and batch_norm={how!r}; leave one of them out")
    for each in [model] if isinstance(model, nn.Module) else model:
        if isinstance(each, nn.Module) and how == "deferred":
            defer_batch_norm(each)
        elif isinstance(each, nn.Module) and how == "exact":
            exact_batch_norm(each, group)


def whole_norms(module: nn.Module) -> list[Exact]:
    """The batch norms of a stage that need the batch in one piece."""
    return [layer for layer in module.modules() if isinstance(layer, Exact)]


def whole_stages(parts: Iterable[StagePart], *, always: bool = False) -> list[int]:
    """The stages that take their batch in one piece in training; or `always`, without running statistics."""
    found = {part.index: whole_norms(part.module) for part in parts}
    return [stage for stage, norms in found.items() if any(not always or norm.running_mean is None for norm in norms)]


_CLASSES: dict[tuple[type[Converted], type[_BatchNorm]], type[Converted]] = {}


def _class_for(kind: type[Converted], plain: type[_BatchNorm]) -> type[Converted]:
    if (kind, plain) not in _CLASSES:
        members = {"plain": plain, "kind": kind, "__module__": __name__, "__doc__": plain.__doc__}
        _CLASSES[kind, plain] = type(f"{kind.__name__}{plain.__name__}", (kind, plain), members)
    return _CLASSES[kind, plain]


def _made(kind: type[Converted], plain: type[_BatchNorm]) -> Converted:
    return object.__new__(_class_for(kind, plain))
