"""An eye on what other stages read of a unit: it must stay as it is.

With the example the unit left it alone, so every stage has the same. A unit that changes it later (in training mode
only, at the hundredth step, at another length) is an error then, and not a wrong number on another stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.errors import ModelError
from penstock.model.replay.recording.snapshot import CONTAINERS, PLAIN, frozen


class Guard:
    """What others read of one unit."""

    def __init__(self, name: str, unit: nn.Module, attributes: Sequence[tuple[str, str]]) -> None:
        self._name, self._attributes = name, list(attributes)
        inner = dict(unit.named_modules())
        self._holders = [(inner[holder], attribute) for holder, attribute in attributes]

    def values(self) -> list[Any]:
        return [_snapshot(holder, attribute) for holder, attribute in self._holders]

    def check(self, before: list[Any]) -> None:
        now = self.values()
        if now == before:
            return
        changed = self._attributes[next(number for number, each in enumerate(now) if each != before[number])]
        raise ModelError(
            f"{self._name} has changed its {'.'.join(filter(None, changed))} in its forward, which it left alone with "
            f"the example; code outside of {self._name} reads it, on stages that do not see the change. Let "
            f"{self._name} return it, or build the pipeline with the model in the mode, and with an example, in which "
            f"it changes"
        )


def _snapshot(holder: nn.Module, attribute: str) -> Any:
    value = vars(holder).get(attribute, holder._buffers.get(attribute))
    if isinstance(holder, _BatchNorm) and holder.num_batches_tracked is not None:
        return frozen(value), holder.num_batches_tracked._version  # its statistics are written past their versions
    return frozen(value, 1) if isinstance(value, (*CONTAINERS, *PLAIN)) else frozen(value, 0)
