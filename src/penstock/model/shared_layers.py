"""Layers that several stages have, and that keep something from call to call.

Parameters of such a layer are tied and its gradients are summed. What it writes to its buffers, or to attributes of its
own, is another matter: in a plain model each microbatch passes the layer at all of its places before the next one
comes; stages run side by side, and on processes each has a copy. Batch norms are refused before anything runs; of other
layers only a call shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ModelError
from penstock.model.names import dotted_name
from penstock.model.replay.recording.snapshot import changed_by, own_state


def refuse_shared_norms(modules: Sequence[nn.Module], names: Sequence[Mapping[str, str]]) -> None:
    """Refuse norms with running statistics in two stages: these have one order of updates, which would not be kept."""
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
        shared = {name: layer for name, layer in modules[index].named_modules() if id(layer) in others}
        inside = {id(inner) for layer in shared.values() for inner in layer.modules() if inner is not layer}
        self._found = [(name, others[id(layer)], layer) for name, layer in shared.items() if id(layer) not in inside]
        self._names = names

    @classmethod
    def of(cls, index: int, modules: Sequence[nn.Module], names: Mapping[str, str]) -> Self | None:
        """Return the shared layers of one stage; None where it shares none."""
        state = cls(index, modules, names)
        return state if state._found else None

    def kept(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, if it leaves all of that as it is."""
        before = [own_state(layer) for _, _, layer in self._found]
        result = run()
        for (prefix, other, layer), old in zip(self._found, before, strict=True):
            for name in (*changed_by(layer, old), *(old.keys() - own_state(layer).keys())):
                holder = layer.get_submodule(name.rpartition(".")[0])
                if holder.training:
                    raise self._refusal(holder, dotted_name(prefix, name), other)
        return result

    def _refusal(self, holder: nn.Module, name: str, other: int) -> ModelError:
        leaf = name.rpartition(".")[2]
        kind = f"buffer {self._names[name]}" if leaf in holder._buffers else f"attribute {leaf}"
        return ModelError(
            f"stages {self._index} and {other} have one {type(holder).__name__}, which changes its {kind} at each "
            f"call; on two stages the order of updates would differ. Cut so that both places are on one stage "
            f"(balance=[...]), or use a copy for each"
        )
