"""The norm of a whole model's gradients, where each rank has some of them, and clipping by it.

Every rank tells the others the norm of what it has, and all join the same numbers in the same order: the norm, what is
clipped and whether it is refused are then the same everywhere. Ranks without gradients have nothing to say: a 0 from
them would be wrong for the norms that look for the smallest entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError, UsageError

PartialNorm = tuple[float, torch.dtype]  # the norm of a rank's gradients, and the dtype that it has there
NormAnswer = PartialNorm | str | None  # what a rank says: its norm, why there can be none, or that it has no gradients


def norm_order(norm_type: Any) -> float:
    """Return the order of a norm: a number, or 'inf'."""
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if math.isnan(order):
        raise UsageError(f"norm_type={norm_type!r}: pass a number, such as 2.0, or 'inf'")
    return order


def check_limit(name: str, value: Any) -> float:
    """Check a limit to which gradients are clipped: a negative one would turn them around."""
    number = isinstance(value, (Real, Tensor)) and not isinstance(value, bool)
    limit = float(value) if number else math.nan
    if not limit >= 0:
        raise UsageError(f"{name}={value!r}: pass a number, 0 or above")
    return limit


def norm_of(gradients: Sequence[Tensor], order: float, foreach: bool | None) -> PartialNorm | None:
    """Compute this rank's part of the norm; None where it has no gradients."""
    if not gradients:
        return None
    norm = nn.utils.get_total_norm(gradients, order, foreach=foreach)
    return norm.item(), norm.dtype


def sparse_gradient(parameters: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return why there is no norm of these gradients: torch has none of sparse ones."""
    for name, parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            return (
                f"the gradient of {name} is sparse, and torch neither clips sparse gradients nor has a norm of them; "
                f"use sparse=False in its layer, or train without clipping, skip_nonfinite and norms"
            )
    return None


def join_norms(norms: Iterable[NormAnswer], order: float) -> Tensor:
    """Compute the norm of all from the norm of each; refuse on every rank alike where one states why there is none."""
    known: list[PartialNorm] = []
    for each in norms:
        if isinstance(each, str):
            raise UsageError(each)
        if each is not None:
            known.append(each)
    if not known:
        return torch.tensor(0.0, device="cpu")
    if len(known) == 1:
        return torch.tensor(known[0][0], dtype=known[0][1], device="cpu")
    each_norm = torch.tensor([norm for norm, _ in known], dtype=torch.float64, device="cpu")
    # A norm of order 0 is a count.
    total = each_norm.sum() if order == 0 else torch.linalg.vector_norm(each_norm, order)
    return total.to(reduce(torch.promote_types, (dtype for _, dtype in known)))


def join_partial(norms: Sequence[PartialNorm | None], order: float) -> PartialNorm | None:
    """Compute the norm of all from the norm of each; None where there are no gradients at all."""
    if all(each is None for each in norms):
        return None
    total = join_norms(norms, order)
    return total.item(), total.dtype


def check_finite(total: Tensor, order: float) -> None:
    """Refuse a norm that is inf or NaN, on every rank alike, since all have the same total."""
    if not torch.isfinite(total):
        raise RunError(
            f"the norm of order {order:g} of all gradients is {total.item()}, so they cannot be clipped by it; find "
            f"the step's inf or nan, or leave error_if_nonfinite out to scale by it all the same"
        )


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, where it is spread over ranks (a DTensor); in the same memory."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return this rank's part as the same kind of tensor as the parameter, in the same memory."""
    if local_of(parameter) is parameter:
        return local
    from torch.distributed.tensor import DTensor  # takes as long to load as torch, and is loaded where there is one

    assert isinstance(parameter, DTensor)
    kind = (parameter.device_mesh, parameter.placements)
    return DTensor.from_local(local, *kind, run_check=False, shape=parameter.shape, stride=parameter.stride())


def local_part(parameter: Tensor) -> Tensor:
    """Return a parameter with its gradient; of one that is spread over ranks, the part that is here, as plain tensors.

    torch's functions on many tensors at once refuse a mixture of both kinds.
    """
    if parameter.grad is None or local_of(parameter.grad) is parameter.grad:
        return parameter
    plain = local_of(parameter).detach()
    plain.grad = local_of(parameter.grad)
    return plain


def scale_down(parameters: Iterable[nn.Parameter], limit: float, total: Tensor, foreach: bool | None) -> None:
    """Scale the gradients by limit / total, where that is below 1."""
    held = [local_part(parameter) for parameter in parameters if parameter.grad is not None]
    if held:
        nn.utils.clip_grads_with_norm_(held, limit, total.to(held[0].device, non_blocking=True), foreach)
