"""Computations of a stage that takes its batch in one piece: see `schedule.lowering.gather`.

What arrives for each microbatch is kept until the last has come; then the stage runs once, on all of them joined, and
what it makes is cut again. Its neighbours, the messages and the loss know of microbatches only. The rows of whatever
crosses a boundary must be in dimension 0, where they can be found by their number; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.runtime.backward.saved_graph import GatheredForward
from penstock.runtime.batch.microbatch import Batch, dims_of_leaves
from penstock.runtime.engine.stage import LossOf, StageInput

if TYPE_CHECKING:
    from penstock.runtime.engine.computations import Computations

Gradients = Sequence[Tensor | None]


class GatheredBatch:
    """The stages of one rank that gather, and what has come for them so far."""

    def __init__(self, computations: Computations) -> None:
        self._computations = computations
        self._forward: dict[int, dict[int, Mapping[int, Any]]] = {}
        self._backward: dict[int, dict[int, Mapping[int, Gradients]]] = {}

    def clear(self) -> None:
        """Forget what has come."""
        self._forward.clear()
        self._backward.clear()

    # -- forward

    def forward(self, stage: int, microbatch: int, arrived: Mapping[int, Any]) -> None:
        """One microbatch has come; the last one runs all."""
        computations = self._computations
        step_input, owner, batch = computations.step_input, computations.stages[stage], computations.step_input.batch
        waiting = self._forward.setdefault(stage, {})
        waiting[microbatch] = arrived
        count = len(batch.args)
        if len(waiting) < count:
            return
        del self._forward[stage]
        rows = _rows(batch, stage)
        by_producer = {source: [waiting[number][source] for number in range(count)] for source in arrived}
        whole = {source: _join(stage, payloads, rows) for source, payloads in by_producer.items()}
        args, kwargs = _join_batch(batch, step_input.batch_dims)
        loss_of = self._loss_of(stage, rows) if owner.is_last and not step_input.attached else None
        if step_input.training:
            recompute = bool(step_input.recompute) or stage in step_input.recompute_stages
            emitted, loss, extra = owner.forward(StageInput(0, whole, args, kwargs, loss_of, recompute=recompute))
            wants = {source: [_wants(each) for each in by_producer[source]] for source in whole}
            owner.saved[0].gathered = GatheredForward(wants, None if loss is None else loss.detach())
        else:
            emitted, _, extra = owner.infer(StageInput(0, whole, args, kwargs, loss_of))
        pieces = {target: _split_rows(stage, payload, rows) for target, payload in emitted.items()}
        for number in range(count):
            own = {target: split[number] for target, split in pieces.items()}
            computations.deliver(stage, number, own, None, extra)  # an extra loss of all counts once for each

    def _loss_of(self, stage: int, rows: list[int]) -> LossOf | None:
        """The sum of the microbatches' losses, each by its share: the whole that enters the backward with 1."""
        computations = self._computations
        step_input = computations.step_input
        if step_input.loss_fn is None and step_input.training:
            raise ModelError(
                f"stage {stage} takes its batch in one piece and its output is the loss itself, which cannot be told "
                f"apart by microbatch; pass loss_fn="
            )
        if not computations.step_losses.are_wanted or step_input.loss_fn is None:
            return None

        def loss_of(output: Any) -> Tensor:
            total: Tensor | None = None
            for number, piece in enumerate(_split_rows(stage, output, rows)):
                loss = computations.step_losses.of(number, piece)
                assert loss is not None
                computations.losses[number] = loss.detach().clone()
                seed = computations.step_losses.seeds.of(number, loss) if step_input.training else loss.new_ones(())
                if seed is not None:
                    total = loss * seed if total is None else total + loss * seed
            assert total is not None, "the shares of a batch are not all 0"
            return total

        return loss_of

    # -- backward

    def backward(self, stage: int, microbatch: int, gradients: Mapping[int, Gradients]) -> None:
        """The gradients of one microbatch have come; the last ones run all."""
        computations = self._computations
        owner, batch = computations.stages[stage], computations.step_input.batch
        waiting = self._backward.setdefault(stage, {})
        waiting[microbatch] = gradients
        count = len(batch.args)
        if len(waiting) < count:
            return
        del self._backward[stage]
        rows, gathered = _rows(batch, stage), owner.saved[0].gathered
        assert gathered is not None, "the forward was of all microbatches"
        whole = {
            target: _join_gradients([waiting[number][target] for number in range(count)], rows) for target in gradients
        }
        seed = None if gathered.loss is None else torch.ones_like(gathered.loss)
        extra = computations.step_losses.seeds.extra * count  # of one forward, not of one for each microbatch
        back = owner.backward(0, whole, split_backward=False, loss_seed=seed, extra_seed=extra)
        if computations.hooks is not None:
            computations.hooks.after(stage)
        for number in range(count):
            own = {
                source: _gradients_of_rows(found, gathered.wants[source], rows, number)
                for source, found in back.items()
            }
            computations.send_gradients_back(stage, number, own)


# ---------------------------------------------------------------------------------------------------------------------


def _rows(batch: Batch, stage: int) -> list[int]:
    if batch.rows is None:
        raise ModelError(f"stage {stage} takes its batch in one piece, but nothing says how many rows it has")
    return batch.rows


def _join_batch(batch: Batch, dims: Mapping[str | int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's own input; what is the same for all microbatches goes in once."""

    def whole(label: str | int, pieces: Sequence[Any]) -> Any:
        leaves, specs = zip(*map(pytree.tree_flatten, pieces), strict=True)
        places = dims_of_leaves(label, dims.get(label, 0), pieces[0], len(leaves[0]))
        joined = [_one(column, dim) for column, dim in zip(zip(*leaves, strict=True), places, strict=True)]
        return pytree.tree_unflatten(joined, specs[0])

    args = tuple(whole(place, column) for place, column in enumerate(zip(*batch.args, strict=True)))
    kwargs = {name: whole(name, [each[name] for each in batch.kwargs]) for name in batch.kwargs[0]}
    return args, kwargs


def _one(column: Sequence[Any], dim: int | None) -> Any:
    first = column[0]
    if not isinstance(first, Tensor) or not first.dim() or dim is None:
        return first
    same = all(each.data_ptr() == first.data_ptr() and each.shape == first.shape for each in column)
    shared = same and first.stride(dim) != 0  # pieces of an expanded row are at one place, too
    return first if shared else torch.cat(tuple(column), dim)


def _join(stage: int, payloads: Sequence[Any], rows: Sequence[int]) -> Any:
    """What came for all microbatches as one payload: leaves that want a gradient where one of theirs does."""
    leaves, specs = zip(*map(pytree.tree_flatten, payloads), strict=True)
    if any(spec != specs[0] for spec in specs[1:]):
        raise ModelError(f"stage {stage} takes its batch in one piece, but what comes has another structure each time")
    joined = []
    for column in zip(*leaves, strict=True):
        if not isinstance(column[0], Tensor):
            joined.append(column[0])
            continue
        for leaf, count in zip(column, rows, strict=True):
            if not leaf.dim() or leaf.shape[0] != count:
                raise ModelError(_no_rows(stage, "gets", leaf, count))
        with torch.no_grad():
            whole = torch.cat(column)
        joined.append(whole.requires_grad_(any(leaf.requires_grad for leaf in column)))
    return pytree.tree_unflatten(joined, specs[0])


def _split_rows(stage: int, payload: Any, rows: Sequence[int]) -> list[Any]:
    leaves, spec = pytree.tree_flatten(payload)
    total, columns = sum(rows), []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not leaf.dim() or leaf.shape[0] != total:
                raise ModelError(_no_rows(stage, "returns", leaf, total))
            columns.append(torch.split_with_sizes(leaf, list(rows)))
        else:
            columns.append((leaf,) * len(rows))
    return [pytree.tree_unflatten([column[number] for column in columns], spec) for number in range(len(rows))]


def _no_rows(stage: int, does: str, leaf: Tensor, count: int) -> str:
    return (
        f"stage {stage} takes its batch in one piece and {does} a tensor of shape {tuple(leaf.shape)}, whose dimension "
        f"0 is not that of the {count} rows; cut the model elsewhere, or use BatchOptions(batch_norm='deferred')"
    )


def _wants(payload: Any) -> list[bool]:
    return [leaf.requires_grad for leaf in pytree.tree_leaves(payload) if isinstance(leaf, Tensor)]


def _join_gradients(parts: Sequence[Gradients], rows: Sequence[int]) -> list[Tensor | None]:
    joined: list[Tensor | None] = []
    for column in zip(*parts, strict=True):
        known = next((gradient for gradient in column if gradient is not None), None)
        if known is None:
            joined.append(None)
            continue
        filled = [
            known.new_zeros(count, *known.shape[1:]) if gradient is None else gradient
            for gradient, count in zip(column, rows, strict=True)
        ]
        joined.append(torch.cat(filled))
    return joined


def _gradients_of_rows(
    found: Sequence[Tensor | None], wants: Sequence[Sequence[bool]], rows: Sequence[int], number: int
) -> list[Tensor | None]:
    """The gradients for one microbatch: of its tensors that want one, among those of all that do."""
    start = sum(rows[:number])
    gradients: list[Tensor | None] = []
    waiting = iter(found)
    for place in range(len(wants[0])):
        if any(each[place] for each in wants):
            gradient = next(waiting)
            if wants[number][place]:
                gradients.append(None if gradient is None else gradient[start : start + rows[number]])
    return gradients
