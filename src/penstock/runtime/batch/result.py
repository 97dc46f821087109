"""What a step or an evaluation gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.errors import UsageError

__all__ = ["StepResult", "loss_value"]


@dataclass(frozen=True)
class StepResult:
    """What a step or an evaluation says, the same on every rank but for `output`."""

    loss: Tensor | None  # of the whole batch, over all replicas
    losses: tuple[Tensor, ...] = ()  # of each microbatch of this replica, by its number
    extra_losses: Mapping[str, float] = field(default_factory=dict)  # what stages gave to add_loss
    output: Any = None  # merged, where asked for, on the rank of the last stage


class _Value(Tensor):
    """A loss to look at: in all but `backward()` a plain tensor, which is what any operation makes of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "this loss is a number without a graph: step() has computed all gradients already, so call "
            "optimizer.step() next; evaluate() computes none"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def loss_value(value: Tensor) -> Tensor:
    """A loss that knows why it has no backward."""
    return value.as_subclass(_Value)
