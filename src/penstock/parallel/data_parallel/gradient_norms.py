"""The norm of gradients that are spread over ranks: every number counted once, on whatever axis it is split.

Each rank takes the norm of what it holds, apart for each set of axes along which that is a part and not the whole, and
only these are joined along these axes. The numbers are exchanged over the links, so a lost rank is named here too, and
all ranks join them in the same order: the result has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.parallel.axis_link import AxisLink
from penstock.runtime.optim.norms import PartialNorm, join_partial, local_of, norm_of


def spread_norm(
    links: Mapping[str, AxisLink], gradients: Sequence[Tensor], order: float, foreach: bool | None
) -> PartialNorm | None:
    """Compute the norm of all of them, over every rank that holds a part of one.

    `links`: those of this rank, by axis; along others nothing is spread.
    """
    kinds: dict[frozenset[str], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(_axes(gradient), []).append(local_of(gradient))
    norms = {axes: norm_of(parts, order, foreach) for axes, parts in kinds.items()}
    for axis, link in links.items():
        answers = link.exchange(norms)
        apart: dict[frozenset[str], list[Any]] = {}
        held = {axes for each in answers for axes in each}
        for axes in sorted(held, key=lambda axes: (axis in axes, *sorted(axes))):
            members = [each.get(axes) for each in answers]
            # What all members hold counts once, as the first has it: another processor may differ in the last bit.
            found = join_partial(members, order) if axis in axes else next(filter(None, members))
            apart.setdefault(axes - {axis}, []).append(found)
        norms = {axes: join_partial(parts, order) for axes, parts in apart.items()}
    return join_partial([norms[axes] for axes in sorted(norms, key=sorted)], order)


def gather_over(links: Mapping[str, AxisLink], call: str, value: Any) -> list[Any]:
    """Return the values of all ranks that hold these parameters, or parts of them, in this call."""
    values = [value]
    for link in links.values():
        values = [each for several in link.all_gather(call, values) for each in several]
    return values


def _axes(gradient: Tensor) -> frozenset[str]:
    """Return the axes along which this rank has only a part."""
    if not isinstance(gradient, DTensor):
        return frozenset()
    names = gradient.device_mesh.mesh_dim_names or ()
    return frozenset(
        name for name, placement in zip(names, gradient.placements, strict=True) if not placement.is_replicate()
    )
