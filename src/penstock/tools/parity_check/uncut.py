"""A cut model against the same model uncut: the part of `parity` that a model which is replayed needs.

Each stage of such a model runs the whole forward, with stand-ins for what it does not need. That it needs no more was
found by following one example, so here it is put to the proof: stand-ins are filled with NaN, which spreads to whatever
depends on them, and the stages together must still give what one stage, with no stand-in at all, gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ParityError
from penstock.model.cut import cut_model
from penstock.model.cut_options import CutOptions
from penstock.model.staged_model import StagedModel

ROUNDINGS = 4  # Times the rounding of the largest gradient.


def uncut(split: StagedModel, model: Any, cut: Mapping[str, Any]) -> StagedModel | None:
    """Return the model in one stage, where its cut could hide a mistake: where stages compute with values of no use.

    Of the cut one, these values become NaN.
    """
    poisoned = [part.poison() for part in split.parts]
    if split.stages == 1 or not poisoned[0]:
        return None
    return cut_model(model, 1, example=cut["example"], options=CutOptions(method="replay"))


def compare_uncut(
    split: StagedModel,
    cut: Mapping[tuple[int, str], Tensor],
    whole: Mapping[tuple[int, str], Tensor],
    tolerance: float | None,
) -> None:
    """Compare gradients, buffers and losses, by name; of a tied parameter's names the model uses the first."""
    prefix = "summed gradient of "
    scale = largest(tensor for (_, name), tensor in whole.items() if name.startswith(prefix))
    for (step, name), have in cut.items():
        own = name.removeprefix(prefix)
        known = f"{prefix}{split.aliases.get(own, own)}" if name.startswith(prefix) else name
        want = whole.get((step, known))
        if want is None:
            raise ParityError(f"step {step}, {known}: the model cut into stages has one, the uncut model has none")
        roundings = 64 * torch.finfo(want.dtype).eps if want.is_floating_point() else 0.0
        allowed = roundings if tolerance is None else tolerance
        check_close(f"step {step}, {known}, cut against uncut", want, have, allowed, scale * name.startswith(prefix))


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest number in them all, of those that are numbers."""
    return max((each.abs().nan_to_num(0.0, 0.0, 0.0).max().item() for each in tensors if each.numel()), default=0.0)


def check_close(place: object, want: Tensor, have: Tensor, tolerance: float, scale: float = 0.0) -> float:
    """Return how far apart they are, relative to the largest entry; raise where that is too far.

    `scale` is the largest gradient of the model: where a gradient is 0 by mathematics (of an attention's key bias),
    what it consists of is the rounding of others, and where that is allowed at all, a few of it are.
    """
    if want.shape != have.shape or want.dtype != have.dtype:
        raise ParityError(
            f"{place}: the pipeline has {have.dtype} of shape {tuple(have.shape)}, the plain model "
            f"{want.dtype} of shape {tuple(want.shape)}"
        )
    if torch.equal(want, have):
        return 0.0
    wide, other = want.to(torch.float64), have.to(torch.float64)
    if torch.allclose(wide, other, 0.0, 0.0, equal_nan=True):  # not a number on both sides
        return 0.0
    floor = ROUNDINGS * torch.finfo(want.dtype).eps * scale if want.is_floating_point() and tolerance else 0.0
    size = max(wide.abs().max().item(), 1e-30) + (floor / tolerance if tolerance else 0.0)
    distance = (other - wide).abs().max().item() / size
    if not distance <= tolerance:
        raise ParityError(
            f"{place}: the pipeline and the plain model differ by {distance:.3g} of its largest entry "
            f"(allowed: {tolerance:.3g})"
        )
    return float(distance)
