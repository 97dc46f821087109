"""Layers that several stages have, and that keep something from call to call.

Parameters of such a layer are tied and its gradients are summed. What it writes to its buffers, or to attributes of its
own, is another matter: in a plain model each microbatch passes the layer at all of its places before the next one
comes; stages run side by side, and on processes each has a copy. Batch norms are refused before anything runs; of other
layers only a call shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ModelError
from penstock.model.use_names import dotted_name


def refuse_shared_norms(modules: Sequence[nn.Module], names: Sequence[Mapping[str, str]]) -> None:
    """Running statistics have one order of updates, which two stages that share them would not keep."""
    where: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.training:
                whole = names[index][dotted_name(name, "running_mean")].removesuffix(".running_mean")
                first, known = where.setdefault(id(layer), (index, whole))
                if first != index:
                    raise ModelError(
                        f"layers {known} and {whole} are one batch norm, on stages {first} and {index}, which would "
                        f"update its running statistics in another order; cut so that both are on one stage "
                        f"(balance=[...]), use a copy for each place, or put it in eval mode"
                    )


class SharedLayers:
    """What one stage's layers keep that other stages have as well, in buffers or plain attributes: it must stay."""

    def __init__(self, index: int, modules: Sequence[nn.Module], names: Mapping[str, str]) -> None:
        others = {
            id(layer): stage for stage, module in enumerate(modules) if stage != index for layer in module.modules()
        }
        self._index = index
        self._found = [
            (place, others[id(layer)], layer) for place, layer in modules[index].named_modules() if id(layer) in others
        ]
        self._names = names

    @classmethod
    def of(cls, index: int, modules: Sequence[nn.Module], names: Mapping[str, str]) -> Self | None:
        """That of one stage; None where it shares no layer."""
        state = cls(index, modules, names)
        return state if state._found else None

    def kept(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, if it leaves all of that as it is."""
        before = [_state(layer) for _, _, layer in self._found]
        result = run()
        for (place, other, layer), old in zip(self._found, before, strict=True):
            new = _state(layer) if layer.training else old
            changed = [name for name in {**old, **new} if not _same(old.get(name), new.get(name))]
            if changed:
                name = dotted_name(place, changed[0])
                kind = f"buffer {self._names[name]}" if changed[0] in layer._buffers else f"attribute {changed[0]}"
                raise ModelError(
                    f"stages {self._index} and {other} have one {type(layer).__name__}, which changes its {kind} at "
                    f"each call; on two stages the order of updates would differ. Cut so that both places are on "
                    f"one stage (balance=[...]), or use a copy for each"
                )
        return result


_OF_MODULES = frozenset(vars(nn.Module()))


def _state(layer: nn.Module) -> dict[str, Any]:
    """Copies of its buffers and of the attributes that a module has beyond those of every module."""
    own = {name: value for name, value in vars(layer).items() if name not in _OF_MODULES}
    return {name: _copy(value) for name, value in {**layer._buffers, **own}.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, list | tuple | set | deque):
        return [type(value), *map(_copy, value)]
    if isinstance(value, dict):
        return [type(value), *(_copy(pair) for pair in value.items())]
    return value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # nan stays nan
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str | bytes) and one == other)
