"""`GPipe`: a module that is called like the one it wraps, and runs as a pipeline forward and backward.

All in one process. `GPipe` holds the wrapped model's own tables of layers, parameters and buffers, not copies of them:
names, state, modes and moves are the model's, and the model stays usable by itself. The cut is made when it can be:
at once for an `nn.Sequential` that is cut by counts, names or parameters, else with the first batch, which is the
example. A batch that takes another path through the model than the example did gets a cut of its own.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.compat.gpipe.arguments import (
    Balance,
    CutRequest,
    as_devices,
    check_gpipe,
    check_tangents,
    cut_another_path,
)
from penstock.compat.gpipe.calls import Calls
from penstock.errors import ModelError, PathError, UsageError
from penstock.model.lru_cache import LruCache
from penstock.model.replay.recording.unit_calls import shapes_of
from penstock.model.staged_model import StagedModel
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.microbatch import check_labels, count_for, split_batch
from penstock.runtime.state.batch_norm import prepare_batch_norm

CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # the arguments of a call


class GPipe(nn.Module):
    """A module that runs as a pipeline: `model = GPipe(model, balance=[2, 2, 2], chunks=8)`, then train it as usual.

    Args:
        model: The model to wrap.
        balance: Layers per stage, such as `[2, 2, 2]`; or a number of stages; or the cost to balance: `"parameters"`,
            `"time"`, `"memory"` or `{name: weight}`. By default, parameters.
        chunks: Microbatches per batch. A batch with fewer rows has fewer.
        checkpoint: Which microbatches run their forward again for the backward, to save memory: all but the last
            (`"except_last"`), all (`"always"`) or none (`"never"`).
        devices: One device per stage. By default, one GPU per stage if there are enough, otherwise the CPU.
        stages: Number of stages, where `balance` says how to find the cut. By default, one per device or core.
        split_at: Names of the modules that begin stages 1, 2, ..., to choose the cut yourself.
        batch_options: How batches are split and what batch norm layers see; `dims`, `batch_norm` and `batch_norm_group`
            of `BatchOptions` apply.
        timeout: Seconds after which a silent stage is an error.
    """

    chunks: int
    checkpoint: str
    devices: list[torch.device] | None
    timeout: float
    _dims: dict[str | int, Any]
    _request: CutRequest
    _calls: Calls | None
    _others: list[Calls]  # cuts for batches that take other paths
    # Which of all these serves a kind of batch, by its shapes and plain values.
    _serves: LruCache[Calls]
    _cut_from: tuple[Any, ...]  # what `_calls` was made from

    def __init__(
        self,
        model: nn.Module,
        balance: Balance = None,
        chunks: int = 8,
        *,
        checkpoint: str = "except_last",
        devices: Iterable[torch.device | str | int] | None = None,
        stages: int | None = None,
        split_at: Sequence[str] | None = None,
        batch_options: BatchOptions = BatchOptions(),
        timeout: float = 3600.0,
    ) -> None:
        super().__init__()
        check_gpipe(GPipe, model, locals())
        placed = as_devices(devices)
        request = CutRequest.of(stages, balance, split_at, placed)
        prepare_batch_norm(model, batch_options.batch_norm, batch_options.batch_norm_group)
        # not as attributes are usually set: the model's own layers may have any of these names
        self.__dict__.update(
            _model=model,
            training=model.training,
            chunks=chunks,
            checkpoint=checkpoint,
            devices=placed,
            _dims=dict(batch_options.dims),
            timeout=timeout,
            _request=request,
            _calls=None,
            _others=[],
            _serves=LruCache(),
            _cut_from=(),
        )
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = getattr(model, name)
        if not request.needs_batch(model):
            self._build(None)

    @property
    def module(self) -> nn.Module:
        """The model that was wrapped."""
        model: nn.Module = self.__dict__["_model"]
        return model

    @property
    def balance(self) -> list[int] | None:
        """Number of layers per stage (units, for other models than `nn.Sequential`); `None` before the cut."""
        return None if self._calls is None else list(self._calls.split.balance)

    # -- like the model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole batch: forward in microbatches now, backward when autograd reaches it.

        Args:
            *args: Positional inputs of the model.
            **kwargs: Keyword inputs of the model.
        """
        return _uncompiled(self._output, args, kwargs)

    def _output(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = (args, dict(kwargs))
        kind = shapes_of(given, (self.training, torch.is_grad_enabled()))
        calls = self._serves.get(kind) or self._calls
        if calls is not None:
            calls.ranks.follow()
        if calls is None or self._cut_from != self._what_is_cut() or calls.ranks.changes.fault():
            calls = self._serves.put(kind, self._build(given))
        check_tangents(given, self.parameters())
        self._check_names(len(args), kwargs)
        if calls.one_path or self._serves.get(kind) is not None:
            return calls(*given, self.training)
        return self._find_path(kind, given)

    def _find_path(self, kind: Any, given: CallArguments) -> Any:
        """Return the output for a first batch of its kind: a run shows whether it takes the path of an existing cut."""
        assert self._calls is not None
        for calls in (self._calls, *self._others):
            try:
                calls.ranks.follow()
                output = calls.undone_if_it_fails(*given, self.training)
            except PathError:
                continue
            self._serves.put(kind, calls)
            return output
        split = cut_another_path(self.module, self._calls.split, self._example(given))
        self._others.append(self._serves.put(kind, self._attach(split)))
        return self._others[-1](*given, self.training)

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
        """Put the layers into training mode, or out of it.

        Args:
            mode: Whether to train (True) or evaluate (False).
        """
        super().train(mode)
        self.module.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the model, as any module's `to`; a device is refused where `devices` places the stages.

        Args:
            *args: As for `nn.Module.to`.
            **kwargs: As for `nn.Module.to`.
        """
        named = kwargs.get("device", kwargs.get("tensor", args[0] if args else None))
        if isinstance(named, (torch.device, str, int, Tensor)):
            self._check_move(f"to({'tensor' if isinstance(named, Tensor) else repr(str(named))})")
        return super().to(*args, **kwargs)

    def cpu(self) -> Self:
        """Move the model to the CPU, as any module's `cpu`; refused where `devices` places the stages."""
        self._check_move("cpu()")
        return super().cpu()

    def cuda(self, device: torch.device | int | None = None) -> Self:
        """Move the model to a GPU, as any module's `cuda`; refused where `devices` places the stages.

        Args:
            device: The number of the GPU, or the device. By default, the current one.
        """
        self._check_move("cuda()")
        return super().cuda(device)

    def _check_move(self, call: str) -> None:
        if self.devices is not None:
            raise UsageError(
                f"{call}: this GPipe has its stages on {', '.join(map(str, self.devices))}; pass other devices= to "
                f"GPipe to move them"
            )

    def close(self) -> None:
        """End the threads of the ranks now. The next call starts new ones."""
        for calls in (self._calls, *self._others):
            if calls is not None:
                calls.ranks.close()

    # -- the cut

    def _build(self, first: CallArguments | None) -> Calls:
        if self._calls is not None and self._cut_from[:1] == self._what_is_cut()[:1]:
            self.close()
        self.__dict__.update(_calls=None, _others=[], _serves=LruCache())
        split = self._cut(first)
        split.warn()
        if self.devices is None and torch.accelerator.device_count() >= split.stages > 1:
            self.__dict__["devices"] = as_devices(range(split.stages))
        calls = self._attach(split)
        self.__dict__.update(_calls=calls, _cut_from=self._what_is_cut())
        return calls

    def _attach(self, split: StagedModel) -> Calls:
        """Attach the stages of a cut, ready for calls."""
        devices = None if self.devices is None else self.devices[: split.stages]
        calls = Calls(split, self.chunks, self.checkpoint, devices, self._dims, self.timeout)
        for part, device in zip(split.parts, devices or (), strict=False):
            part.module.to(device)
        calls.ranks.track_changes()
        return calls

    def _what_is_cut(self) -> tuple[Any, ...]:
        """Return what needs a new cut when it changes: layers, numbers, and the process, as a fork has no threads."""
        return (os.getpid(), self.chunks, self.checkpoint, *self._modules.values())

    def _cut(self, first: CallArguments | None) -> StagedModel:
        looks = first is not None and self._request.needs_batch(self.module)
        return self._request.cut(self.module, self.chunks, self._example(first) if first and looks else None)

    def _example(self, given: CallArguments) -> tuple[Any, ...] | dict[str, Any]:
        """Return the first microbatch, as what to look at for the cut."""
        args, kwargs = given
        count = count_for(self.chunks, args, kwargs, None, self._dims) or 1
        batch = split_batch(count, args, kwargs, None, {}, self._dims)
        if not kwargs:
            return batch.args[0]
        try:
            bound = inspect.signature(self.module.forward).bind(*batch.args[0], **batch.kwargs[0])
        except TypeError as error:
            raise ModelError(f"{type(self.module).__name__} cannot be called like this: {error}") from error
        if bound.args and any(name not in bound.arguments for name in self._names(len(bound.args))):
            raise ModelError(
                "in the first call of a model that is cut by its forward, pass either all arguments by keyword or none"
            )
        return {**dict(zip(self._names(len(bound.args)), bound.args, strict=True)), **bound.kwargs}

    def _names(self, count: int) -> list[str]:
        return list(inspect.signature(self.module.forward).parameters)[:count]

    def _check_names(self, count: int, kwargs: Mapping[str, Any]) -> None:
        assert self._calls is not None
        parts = self._calls.split.parts
        for name in kwargs:
            if not any(part.takes is None or name in part.takes for part in parts):
                raise TypeError(f"{type(self.module).__name__} got an unexpected keyword argument {name!r}")
        if self._dims:
            passed = [*range(count), *kwargs, "output"]
            check_labels(self._dims, passed, {*passed, *inspect.signature(self.module.forward).parameters})

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or pickle, without the ranks: a copy makes its own."""
        counts = self.balance if isinstance(self.module, nn.Sequential) else None
        kept = {name: value for name, value in self.__dict__.items() if name != "_serves"}
        return {**kept, "_calls": None, "_others": [], "_cut_from": (), "_request": self._request.with_counts(counts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_serves": LruCache()})  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        cut = f"balance={self.balance}" if self._calls is not None else "not cut yet"
        return f"{cut}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"


def _uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Keep torch.compile out: it cannot look into other threads, so what it compiles ends before this and goes on
    after.
    """
    dynamo = sys.modules.get("torch._dynamo")
    return function(*arguments) if dynamo is None else dynamo.disable(function)(*arguments)


_uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
