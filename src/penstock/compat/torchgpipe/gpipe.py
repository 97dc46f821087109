"""torchgpipe's `GPipe`: its signature, defaults, attributes, keys and errors, on Penstock's engine.

The layers of the model are put into `partitions`, one `nn.Sequential` per stage, which is what the state's keys, and
hooks on partitions, go by. Batches are cut with `chunk`: each microbatch has the rows that torchgpipe gives it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat.gpipe import gpipe
from penstock.compat.gpipe.arguments import CALL_RULES, as_devices
from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm
from penstock.compat.torchgpipe.errors import BalanceError, TooFewDevicesError, WrongTypeError
from penstock.compat.torchgpipe.skip import verify_skippables
from penstock.devices import accelerator
from penstock.errors import ModelError
from penstock.model.cut import cut_model
from penstock.model.staged_model import StagedModel
from penstock.rules import check_rules
from penstock.runtime.batch.microbatch import Microbatches

__all__ = ["BalanceError", "GPipe", "verify_module"]


def verify_module(module: Any) -> None:
    """Raise unless the module is an `nn.Sequential` whose layers are distinct and share no parameters."""
    if not isinstance(module, nn.Sequential):
        raise WrongTypeError(
            f"GPipe cuts an nn.Sequential, and this is a {type(module).__name__}; penstock.GPipe takes any module"
        )
    layers = list(module)
    if None in layers:
        raise ModelError("a layer of the model is None; leave it out, or put nn.Identity() in its place")
    if len({id(layer) for layer in layers}) != len(layers):
        raise ModelError("a layer is in the model twice; use a copy for each place, or penstock.GPipe")
    if len(list(module.parameters())) != sum(len(list(layer.parameters())) for layer in layers):
        raise ModelError("layers of the model share a parameter; put them into one layer, or use penstock.GPipe")


class GPipe(gpipe.GPipe):
    """A model that runs as a pipeline, as with torchgpipe: `GPipe(nn.Sequential(a, b, c), balance=[1, 2], chunks=8)`.

    Args:
        module: The model; its layers must be distinct and share no parameters.
        balance: Layers per partition.
        devices: One device per partition. By default, the GPUs, or the CPU if there is none.
        chunks: Microbatches per batch.
        checkpoint: Which microbatches run their forward again for the backward: `"except_last"`, `"always"` or
            `"never"`.
        deferred_batch_norm: Whether running statistics of batch norm layers follow whole batches.
    """

    devices: list[torch.device]
    partitions: nn.ModuleList

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | int | str] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        chunks, checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise BalanceError("balance is missing: pass the number of layers of each partition")
        check_rules({"chunks": chunks, "checkpoint": checkpoint}, CALL_RULES)
        verify_module(module)
        verify_skippables(module)
        counts = _counts(module, balance)
        placed = _placed(devices, len(counts))
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        super().__init__(_Partitioned(module, counts), chunks=chunks, checkpoint=checkpoint, devices=placed)
        self.register_load_state_dict_pre_hook(_renumber)  # type: ignore[no-untyped-call]
        if counts:
            self._build(None)

    @property
    def balance(self) -> list[int]:
        """Number of layers per partition."""
        return [len(partition) for partition in self._partitions()]

    def _partitions(self) -> list[nn.Sequential]:
        return list(self.partitions)  # type: ignore[arg-type]

    def _layers(self) -> list[nn.Module]:
        return [layer for partition in self._partitions() for layer in partition]

    # -- calls

    def forward(self, input: Any) -> Any:
        """Return the output for the whole batch: a tensor, or a tuple of tensors, as the input is.

        Args:
            input: A tensor, or a tuple of tensors.
        """
        _check_value(input, "the input")
        if not self._partitions():
            return input
        output = super().forward(Microbatches(_scatter(input, self.chunks)))
        _check_value(output, "the output")
        return output

    def _check_move(self, call: str) -> None:
        """Refuse a device as torchgpipe does: with a `TypeError`."""
        raise WrongTypeError(
            f"{call}: GPipe puts each partition on its own device, {', '.join(map(str, self.devices))}; pass devices= "
            f"to GPipe to choose others. to(dtype) is fine"
        )

    # -- the cut

    def _what_is_cut(self) -> tuple[Any, ...]:
        return (*super()._what_is_cut(), *self._partitions())

    def _cut(self, first: Any) -> StagedModel:
        """Cut one stage for each partition, which is called as a module: it may have hooks."""
        partitions = self._partitions()
        return cut_model(nn.Sequential(*partitions), len(partitions), balance=[1] * len(partitions))


class _Partitioned(nn.Module):
    """The layers of a model in partitions: what a GPipe's tables of modules, parameters and buffers are."""

    def __init__(self, module: nn.Sequential, counts: list[int]) -> None:
        super().__init__()
        layers = iter(module._modules.items())
        groups = [OrderedDict(next(layers) for _ in range(count)) for count in counts]
        self.partitions = nn.ModuleList(nn.Sequential(group) for group in groups)
        for each in (self, self.partitions, *self.partitions):
            each.training = module.training

    def forward(self, input: Any) -> Any:
        """Run the model without a pipeline."""
        for partition in self.partitions:
            input = partition(input)
        return input


def _counts(module: nn.Sequential, balance: Iterable[int]) -> list[int]:
    given: list[Any]
    try:
        given = list(balance)
        counts = [int(count) for count in given]
    except (TypeError, ValueError):
        given, counts = [balance], []
    if counts != given:
        raise WrongTypeError(f"balance={balance!r}: pass the number of layers of each partition, such as [2, 2]")
    if sum(counts) != len(module):
        raise BalanceError(f"balance={counts} is for {sum(counts)} layers, and the model has {len(module)}")
    if any(count < 1 for count in counts):
        raise BalanceError(f"balance={counts}: each partition needs at least 1 layer")
    return counts


def _placed(devices: Iterable[Any] | None, partitions: int) -> list[torch.device]:
    """Choose a device for each partition; by default GPUs, or the CPU where there is none."""
    if devices is None:
        devices = range(torch.accelerator.device_count()) if accelerator() else ["cpu"] * partitions
    placed = as_devices(devices) or []
    if len(placed) < partitions:
        raise TooFewDevicesError(f"{partitions} partitions need as many devices; there are {len(placed)}")
    return placed[:partitions]


def _check_value(value: Any, what: str) -> None:
    """Check that a value is a tensor, or a tuple of such values."""
    if isinstance(value, tuple):
        for each in value:
            _check_value(each, what)
    elif not isinstance(value, Tensor):
        raise WrongTypeError(
            f"{what} is a tensor or a tuple of tensors with torchgpipe; here is a {type(value).__name__}"
        )


def _scatter(value: Any, chunks: int) -> list[Any]:
    """Cut a value into microbatches, as `chunk` does; there may be fewer than `chunks`."""
    leaves, spec = pytree.tree_flatten(value)
    pieces = [leaf.chunk(chunks) for leaf in leaves]
    if len(found := sorted({len(each) for each in pieces})) > 1:
        rows = ", ".join(str(leaf.shape[0]) for leaf in leaves)
        raise ModelError(
            f"tensors of the input have {rows} rows, which make {found} microbatches of chunks={chunks}; pass tensors "
            f"with as many rows each"
        )
    return [pytree.tree_unflatten(list(each), spec) for each in zip(*pieces, strict=True)]


def _renumber(model: GPipe, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renumber keys of another balance: the names of the layers show which partition they belong to."""
    places = {name: number for number, each in enumerate(model._partitions()) for name in each._modules}
    head = f"{prefix}partitions."
    for key in [key for key in state if key.startswith(head)]:
        rest = key.removeprefix(head).partition(".")[2]
        name = rest.partition(".")[0]
        if name in places:
            state[f"{head}{places[name]}.{rest}"] = state.pop(key)
