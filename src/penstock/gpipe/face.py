"""The face of GPipe: a module that is called like the one it wraps, and runs as a pipeline forward and backward.

All in one process. `GPipe` holds the wrapped model's own tables of layers, parameters and buffers, not copies of them:
names, state, modes and moves are the model's, and the model stays usable by itself. The cut is made when it can be:
at once for an `nn.Sequential` that is cut by counts or parameters, else with the first batch, which is the example.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Self

import torch
from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.gpipe.arguments import check_gpipe, check_tangents
from penstock.gpipe.calls import Calls
from penstock.model.balance.request import Balancing
from penstock.model.cut import cut_model
from penstock.model.split import Split, more_than_its_layers
from penstock.runtime.batch.microbatch import check_labels, count_for, split_batch
from penstock.runtime.state.batch_norm import prepare_batch_norm
from penstock.schedule import build

__all__ = ["GPipe"]

Balance = Sequence[int] | int | str | Mapping[str, float] | None
MOST_BY_ITSELF = 8  # stages on a CPU where nothing says how many


class GPipe(nn.Module):
    """`model = GPipe(model, balance=[2, 2, 2], chunks=8)`, and train it as any module."""

    chunks: int
    checkpoint: str
    devices: list[torch.device] | None
    batch_dims: dict[str | int, Any]
    batch_norm: str
    timeout: float
    _how: Any
    _stages: int | None
    _calls: Calls | None
    _cut_from: tuple[Any, ...]  # what `_calls` was made from

    def __init__(
        self,
        model: nn.Module,
        balance: Balance = None,
        chunks: int = 8,
        *,
        checkpoint: str = "except_last",
        devices: Sequence[torch.device | str] | None = None,
        deferred_batch_norm: bool = False,
        batch_norm: str = "microbatch",
        batch_norm_group: Any = None,
        stages: int | None = None,
        batch_dims: Mapping[str | int, Any] | None = None,
        timeout: float = 3600.0,
    ) -> None:
        super().__init__()
        check_gpipe(GPipe, model, locals())
        batch_norm = "deferred" if deferred_batch_norm else batch_norm
        prepare_batch_norm(model, batch_norm, batch_norm_group)
        placed = None if devices is None else [torch.device(device) for device in devices]
        counts = list(balance) if isinstance(balance, Sequence) and not isinstance(balance, str) else None
        how = "parameters" if balance is None or isinstance(balance, int) else balance
        Balancing(how)  # which refuses what it does not know
        # not as attributes are usually set: the model's own layers may have any of these names
        self.__dict__.update(
            _model=model,
            training=model.training,
            chunks=chunks,
            checkpoint=checkpoint,
            devices=placed,
            batch_dims=dict(batch_dims or {}),
            batch_norm=batch_norm,
            timeout=timeout,
            _how=how,
            _stages=_how_many(stages, balance if isinstance(balance, int) else counts, placed),
            _calls=None,
            _cut_from=(),
        )
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)
        if isinstance(model, nn.Sequential) and not more_than_its_layers(model) and how in ("parameters", counts):
            self._build(None)

    @property
    def module(self) -> nn.Module:
        """The model that was wrapped."""
        model: nn.Module = self.__dict__["_model"]
        return model

    @property
    def balance(self) -> list[int] | None:
        """How many layers (of another model than `nn.Sequential`: units) each stage has; None before it is cut."""
        if self._calls is None:
            return None
        split = self._calls.split
        bounds = [0, *split.cuts, len(split.weights)]
        return [end - start for start, end in pairwise(bounds)]

    # -- like the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output for the whole batch: forward in microbatches now, backward when autograd comes to it."""
        return _uncompiled(self._output, args, kwargs)

    def _output(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._calls is not None:
            self._calls.ranks.follow()
        if self._calls is None or self._cut_from != self._what_is_cut() or self._calls.ranks.changes.fault():
            self._build((args, kwargs))
        assert self._calls is not None
        check_tangents((args, kwargs), self.parameters())
        self._check_names(len(args), kwargs)
        return self._calls(args, kwargs, self.training)

    def __len__(self) -> int:
        return len(self._layers())

    def __getitem__(self, index: int | slice) -> nn.Module:
        layers = self._layers()
        return nn.Sequential(*layers[index]) if isinstance(index, slice) else layers[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def _layers(self) -> list[nn.Module]:
        return [layer for layer in self._modules.values() if layer is not None]

    def train(self, mode: bool = True) -> Self:
        """Put the layers into training mode, or out of it."""
        super().train(mode)
        self.module.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As of any module, but for a device where `devices` says where each stage is."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and self.devices is not None:
            raise UsageError(
                f"to({str(device)!r}): this GPipe has its stages on {', '.join(map(str, self.devices))}; pass other "
                f"devices= to GPipe to move them"
            )
        return super().to(*args, **kwargs)

    def close(self) -> None:
        """End the threads of the ranks now; the next call starts others."""
        if self._calls is not None:
            self._calls.ranks.close()

    # -- the cut

    def _by_itself(self) -> int:
        """How many stages where nothing says so: one for each GPU, or for each core there is."""
        many = torch.cuda.device_count() or min(len(os.sched_getaffinity(0)), MOST_BY_ITSELF)
        return max(1, min(many, len(self._layers()) if isinstance(self.module, nn.Sequential) else many))

    def _build(self, first: tuple[tuple[Any, ...], Mapping[str, Any]] | None) -> None:
        if self._calls is not None and self._cut_from[:1] == self._what_is_cut()[:1]:
            self._calls.ranks.close()
        self.__dict__["_calls"] = None
        split = self._split(first)
        split.warn()
        devices = self.devices
        if devices is None and torch.cuda.device_count() >= split.stages > 1:
            devices = self.__dict__["devices"] = [torch.device("cuda", number) for number in range(split.stages)]
        calls = Calls(split, self.chunks, self.checkpoint, devices, self.batch_dims, self.timeout)
        for part, device in zip(split.parts, devices or (), strict=False):
            part.module.to(device)
        calls.ranks.watch()
        self.__dict__.update(_calls=calls, _cut_from=self._what_is_cut())

    def _what_is_cut(self) -> tuple[Any, ...]:
        """Layers and numbers that were replaced, and a process that was forked and has no threads, need a new cut."""
        return (os.getpid(), self.chunks, self.checkpoint, *self._modules.values())

    def _split(self, first: tuple[tuple[Any, ...], Mapping[str, Any]] | None) -> Split:
        model, how = self.module, self._how
        stages = self._stages or self._by_itself()
        by_position = isinstance(model, nn.Sequential) and not more_than_its_layers(model)
        example = None
        if first is not None and (not by_position or how in ("time", "memory")):
            example = self._example(*first)
        balancing = Balancing(how, schedule_for=lambda count: build("gpipe", count, self.chunks))
        if balancing.counts is not None:
            stages = len(balancing.counts)
        fewest = stages if self._stages or balancing.counts or by_position else 1
        for count in range(stages, fewest, -1):  # as many as there can be, where nothing says how many
            with suppress(ModelError):
                return cut_model(model, count, balance=balancing, example=example)
        return cut_model(model, fewest, balance=balancing, example=example)

    def _example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
        """The first microbatch, as what to look at for the cut."""
        count = count_for(self.chunks, args, kwargs, None, self.batch_dims) or 1
        batch = split_batch(count, args, kwargs, None, {}, self.batch_dims)
        if not kwargs:
            return batch.args[0]
        try:
            bound = inspect.signature(self.module.forward).bind(*batch.args[0], **batch.kwargs[0])
        except TypeError as error:
            raise ModelError(f"{type(self.module).__name__} cannot be called like this: {error}") from error
        if bound.args and any(name not in bound.arguments for name in self._names(len(bound.args))):
            raise ModelError("the first call of a model that is cut by its forward has all arguments by name, or none")
        return {**dict(zip(self._names(len(bound.args)), bound.args, strict=True)), **bound.kwargs}

    def _names(self, count: int) -> list[str]:
        return list(inspect.signature(self.module.forward).parameters)[:count]

    def _check_names(self, count: int, kwargs: Mapping[str, Any]) -> None:
        assert self._calls is not None
        parts = self._calls.split.parts
        for name in kwargs:
            if not any(part.takes is None or name in part.takes for part in parts):
                raise TypeError(f"{type(self.module).__name__} got an unexpected keyword argument {name!r}")
        if self.batch_dims:
            passed = [*range(count), *kwargs, "output"]
            check_labels(self.batch_dims, passed, {*passed, *inspect.signature(self.module.forward).parameters})

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """Without the ranks: a copy makes its own."""
        counts = self.balance if isinstance(self.module, nn.Sequential) else None
        return {**self.__dict__, "_calls": None, "_cut_from": (), "_how": counts or self._how}

    def extra_repr(self) -> str:
        cut = f"balance={self.balance}" if self._calls is not None else "not cut yet"
        return f"{cut}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"


def _how_many(*said: int | Sequence[Any] | None) -> int | None:
    """The number of stages that the arguments agree on; None where none of them says."""
    numbers = zip(("stages", "balance", "devices"), said, strict=True)
    given = {name: len(value) if isinstance(value, Sequence) else value for name, value in numbers if value is not None}
    if len(set(given.values())) > 1:
        words = ", ".join(f"{name}= says {value}" for name, value in given.items())
        raise UsageError(f"how many stages? {words}; leave all but one out, or make them agree")
    return next(iter(given.values()), None)


def _uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """torch.compile cannot look into other threads: what it compiles ends before this, and goes on after it."""
    dynamo = sys.modules.get("torch._dynamo")
    return function(*arguments) if dynamo is None else dynamo.disable(function)(*arguments)


_uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
