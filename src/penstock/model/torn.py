"""Layers that several stages have, and that keep something from call to call.

Parameters of such a layer are tied and its gradients are summed. What it writes to its buffers is another matter: in a
plain model each microbatch passes the layer at all of its places before the next one comes;
stages run side by side, and on processes each has a copy. Batch norms are refused before anything runs; of other layers
only a call shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ModelError

__all__ = ["SharedBuffers", "refuse_torn_norms"]


def refuse_torn_norms(modules: Sequence[nn.Module], names: Sequence[Mapping[str, str]]) -> None:
    """Running statistics have one order of updates, which two stages that share them would not keep."""
    where: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.training:
                whole = names[index][f"{name}.running_mean" if name else "running_mean"].removesuffix(".running_mean")
                first, known = where.setdefault(id(layer), (index, whole))
                if first != index:
                    raise ModelError(
                        f"layers {known} and {whole} are one batch norm, on stages {first} and {index}, which would "
                        f"update its running statistics in another order; cut so that both are on one stage "
                        f"(balance=[...]), use a copy for each place, or put it in eval mode"
                    )


class SharedBuffers:
    """The buffers of one stage's layers that other stages have as well: they must stay as they are."""

    def __init__(self, index: int, modules: Sequence[nn.Module], names: Mapping[str, str]) -> None:
        others = {
            id(layer): stage for stage, module in enumerate(modules) if stage != index for layer in module.modules()
        }
        self._index = index
        self._found = [
            (names[f"{place}.{name}" if place else name], others[id(layer)], layer, name)
            for place, layer in modules[index].named_modules()
            if id(layer) in others
            for name, buffer in layer._buffers.items()
            if buffer is not None
        ]

    def __bool__(self) -> bool:
        return bool(self._found)

    def kept(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, if it leaves them as they are."""
        before = [_copy(layer._buffers.get(name)) for _, _, layer, name in self._found]
        result = run()
        for (whole, other, layer, name), old in zip(self._found, before, strict=True):
            if layer.training and not _same(old, layer._buffers.get(name)):
                raise ModelError(
                    f"stages {self._index} and {other} have one {type(layer).__name__}, which changes its buffer "
                    f"{whole} at each call; on two stages the order of updates would be another. Cut so that both "
                    f"places are on one stage (balance=[...]), or use a copy for each"
                )
        return result


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # nan stays nan
