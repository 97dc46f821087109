"""What a step or an evaluation gives back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.errors import UsageError


@dataclass(frozen=True)
class StepResult:
    """What a step or an evaluation returns: the same on every rank, except for `output`.

    Attributes:
        loss: The loss of the whole batch, over all replicas. It has no graph: gradients are already computed.
        losses: One loss per microbatch of this replica, in order.
        extra_losses: The mean of each loss that stages passed to `add_loss`, by name.
        output: The model's output for the batch, if it was asked for, on the rank of the last stage.
    """

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


def loss_values(values: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Losses that know why they have no backward."""
    return tuple(value.as_subclass(_Value) for value in values)
