"""Two microbatches taken together must have the loss that their own losses give, each by its weight.

The loss is called once more per microbatch, without gradients, on outputs that are there. Random numbers and the state
of a loss that is a module are put back; what else a function does when it is called, it does once more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.devices import device_types
from penstock.errors import ModelError
from penstock.runtime.batch.microbatch import Batch, dims_of_leaves
from penstock.runtime.batch.rowed import is_rowed
from penstock.runtime.loss.losses import check_loss
from penstock.runtime.loss.pair_loss import CannotJoinError, first_rows, join_leaf, untouched

if TYPE_CHECKING:
    from penstock.runtime.loss.check import LossChecks, Mark
    from penstock.runtime.loss.shares import BatchShares

BYTES = 32 * 2**20  # of an output that is kept until the next one: of larger ones, fewer rows are looked at
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)  # of a loss, if it takes
# rows of one microbatch only, or what was joined is no row
FEW = 64  # roundings that two numbers may be apart
FEW_OF_COARSE, COARSE = 4, 1e-4  # and of numbers that are coarser than this
WIDE = torch.float32  # in which coarse ones are asked once more

Given = tuple[Any, Any, Mapping[str, Any]]  # to the loss: output, target and keywords


class _MicrobatchRows(NamedTuple):
    """Some rows of one microbatch, or all of them."""

    number: int
    rows: int
    output: Any
    part: Batch  # with what was passed for these rows
    weight: float | None  # None: losses add up
    loss: float

    @property
    def given(self) -> Given:
        return self.output, self.part.targets[0], self.part.loss_kwargs[0]


class PairCheck:
    """The check of one step: each microbatch with the one before it."""

    def __init__(
        self, checks: LossChecks, batch: Batch, shares: BatchShares, shapes: Hashable, uneven: set[Mark]
    ) -> None:
        self._checks, self._batch, self._shares = checks, batch, shares
        self._kind = (shapes, uneven)
        self._before: _MicrobatchRows | None = None
        self._seen: set[int] = set()
        self._kinds: set[torch.dtype] = set()  # of losses
        self.loss_unchecked = False  # outputs could not be joined, so that only whole forwards can tell

    def saw(self, number: int, output: Any, loss: Tensor) -> None:
        """The output and the loss of a microbatch, in its forward."""
        if self.loss_unchecked or self._checks.loss_fn is None or number in self._seen:  # or it is recomputed
            return
        self._seen.add(number)
        self._kinds.add(loss.dtype)
        try:
            rows = self._take(number, pytree.tree_map_only(Tensor, Tensor.detach, output), loss)
            if self._before is not None:
                self._compare(self._before, rows)
            self._before = rows
        except CannotJoinError:
            self.loss_unchecked, self._before = True, None

    def end(self) -> bool:
        """The step is done. Whether the question is still open."""
        self._before = None
        if self._checks.loss_fn is None:
            self.loss_unchecked = not self._shares.is_read
        if not self.loss_unchecked:
            self.passed()
        return self.loss_unchecked

    def passed(self) -> None:
        """The loss is what it should be."""
        self._checks.passed(*self._kind)

    # -- one microbatch

    def _take(self, number: int, output: Any, loss: Tensor) -> _MicrobatchRows:
        """What is kept of a microbatch until the next has come: all, or of large outputs as many rows as are small."""
        batch = self._batch
        if batch.rows is None:
            raise CannotJoinError
        rows = batch.rows[number]
        size = sum(each.numel() * each.element_size() for each in _tensors(output))
        few = rows if size <= BYTES else max(1, rows * BYTES // size)
        if few == rows:
            part = Batch(
                [batch.args[number]],
                [batch.kwargs[number]],
                [batch.targets[number]],
                [batch.loss_kwargs[number]],
                [rows],
                batch.has_target,
            )
            return _MicrobatchRows(number, rows, output, part, self._shares.weight(number), check_loss(loss).item())
        part = Batch(
            [tuple(self._cut(place, value, number, few) for place, value in enumerate(batch.args[number]))],
            [{name: self._cut(name, value, number, few) for name, value in batch.kwargs[number].items()}],
            [self._cut("target", batch.targets[number], number, few)],
            [{name: self._cut(name, value, number, few) for name, value in batch.loss_kwargs[number].items()}],
            [few],
            batch.has_target,
        )
        kept = pytree.tree_map_only(Tensor, Tensor.clone, self._cut("output", output, number, few))
        found = _MicrobatchRows(number, few, kept, part, self._weight(part), math.nan)
        return found._replace(loss=self._loss(found.given))

    def _weight(self, part: Batch) -> float | None:
        """As `BatchShares.weight`, of rows that are no microbatch."""
        measure = self._shares.measure
        weights = [0.0] if measure is None else measure(part)
        return None if weights is None else weights[0]

    def _cut(self, label: str | int, value: Any, number: int, few: int) -> Any:
        assert self._batch.rows is not None
        rows = self._batch.rows[number]
        leaves, spec = pytree.tree_flatten(value, is_leaf=is_rowed)
        dims = dims_of_leaves(label, self._checks.dims.get(label, 0), value, len(leaves))
        others = pytree.tree_leaves(
            None if label == "output" else self._value(label, number - 1 if number else 1), is_rowed
        )
        others += [None] * len(leaves)
        cut = [first_rows(leaf, other, dim, rows, few) for leaf, other, dim in zip(leaves, others, dims, strict=False)]
        return pytree.tree_unflatten(cut, spec)

    def _value(self, label: str | int, number: int) -> Any:
        batch = self._batch
        if label == "target":
            return batch.targets[number]
        if isinstance(label, int):
            return batch.args[number][label]
        named = batch.kwargs[number] if label in batch.kwargs[number] else batch.loss_kwargs[number]
        return named.get(label)

    def _loss(self, given: Given) -> float:
        """The loss of these rows, without a trace; nan where it draws random numbers, so that it says nothing."""
        loss_fn = self._checks.loss_fn
        assert loss_fn is not None
        output, target, extra = given
        with torch.no_grad(), untouched(loss_fn) as drew:
            loss = check_loss(loss_fn(output, target, **extra)).item()
        if not drew():
            return float(loss)
        self._checks.cannot_tell("it draws random numbers")
        return math.nan

    # -- two of them

    def _compare(self, one: _MicrobatchRows, two: _MicrobatchRows) -> None:
        together = self._join(one, two)
        eps, few = self._precision(together)
        self._judge(one, two, together, eps, few)
        if eps >= COARSE:
            wide = [self._wide(each) for each in (one, two)]
            if wide[0] is not None and wide[1] is not None:
                self._judge(wide[0], wide[1], self._join(wide[0], wide[1]), torch.finfo(WIDE).eps, FEW)

    def _judge(self, one: _MicrobatchRows, two: _MicrobatchRows, together: Given, eps: float, few: int) -> None:
        expected = _expected((one.loss, two.loss), (one.weight, two.weight))
        if math.isinf(expected) or one.weight == two.weight == 0:
            return  # of a batch that has no mean, others will speak
        try:
            found = self._loss(together)
        except FAILURES:
            raise CannotJoinError from None
        if not math.isfinite(found) or found == expected:
            return
        scale = max(abs(one.loss) if one.weight != 0 else 0.0, abs(two.loss) if two.weight != 0 else 0.0, abs(found))
        if abs(found - expected) <= few * eps * scale:
            return
        if math.isfinite(expected):
            # signed terms may cancel, so that rounding is large beside their mean: the rows in another order show it
            noise = abs(self._loss(self._join(two, one)) - found)
            largest = max((each.abs().max().item() for each in _tensors(together) if _is_float(each)), default=0.0)
            if abs(found - expected) <= min(few * noise, max(math.sqrt(eps) * scale, few * eps * largest)):
                return
        raise disagreement(
            f"the loss of microbatches {one.number} and {two.number} taken together is {found:.7g}, but their own, "
            f"{_weighed(one)} and {_weighed(two)}, make {expected:.7g}",
            adds=abs(found - one.loss - two.loss) <= few * eps * scale,
        )

    def _wide(self, rows: _MicrobatchRows) -> _MicrobatchRows | None:
        """The same in numbers that hide no difference; None where the loss does not keep to them."""
        output, args, kwargs, targets, loss_kwargs = (
            pytree.tree_map_only(Tensor, _widened, each)
            for each in (rows.output, rows.part.args, rows.part.kwargs, rows.part.targets, rows.part.loss_kwargs)
        )
        part = Batch(args, kwargs, targets, loss_kwargs, [rows.rows], rows.part.has_target)
        wide = rows._replace(output=output, part=part)
        with ExitStack() as stack:
            for kind in device_types():
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            kinds = stack.enter_context(_Kinds())
            try:
                wide = wide._replace(weight=self._weight(part), loss=self._loss(wide.given))
            except FAILURES:
                return None
        return None if any(_is_coarse(kind) for kind in kinds.seen) else wide

    def _join(self, one: _MicrobatchRows, two: _MicrobatchRows) -> tuple[Any, Any, dict[str, Any]]:
        if one.given[2].keys() != two.given[2].keys():
            raise CannotJoinError
        rows, dims = (one.rows, two.rows), self._checks.dims

        def joined(label: str, a: Any, b: Any) -> Any:
            leaves, specs = zip(*(pytree.tree_flatten(each, is_leaf=is_rowed) for each in (a, b)), strict=True)
            if specs[0] != specs[1]:
                raise CannotJoinError
            places = dims_of_leaves(label, dims.get(label, 0), a, len(leaves[0]))
            found = [join_leaf(x, y, dim, rows) for x, y, dim in zip(*leaves, places, strict=True)]
            return pytree.tree_unflatten(found, specs[0])

        names = one.given[2]
        return (
            joined("output", one.given[0], two.given[0]),
            joined("target", one.given[1], two.given[1]),
            {name: joined(name, names[name], two.given[2][name]) for name in names},
        )

    def _precision(self, given: Any) -> tuple[float, int]:
        """The rounding of the coarsest numbers that the loss works with, and how many of these may add up."""
        kinds = {each.dtype for each in _tensors(given) if _is_float(each)} | self._kinds
        kinds |= {torch.get_autocast_dtype(kind) for kind in device_types() if torch.is_autocast_enabled(kind)}
        eps = max(torch.finfo(kind).eps for kind in kinds)
        return eps, FEW if eps < COARSE else FEW_OF_COARSE


def disagreement(what: str, adds: bool) -> ModelError:
    """The error for losses of microbatches that do not make the batch's."""
    first = (
        "they add up, so pass loss_options=LossOptions(reduction='sum')"
        if adds
        else "pass loss_options=LossOptions(reduction='sum') if losses add up"
    )
    return ModelError(
        f"{what}: neither the batch's loss nor its gradients would be those of the whole batch in one piece; {first}. "
        f"If the loss is a mean over something else than rows, pass weight=, a function that counts it, of the "
        f"target or of anything that step() is passed, by name, such as lambda labels: (labels != -100).sum(). If it "
        f"compares rows with each other, as a contrastive loss does, it can only compare those of one microbatch: pass "
        f"per_microbatch=True if that is what you mean"
    )


def _expected(losses: tuple[float, float], weights: tuple[float | None, float | None]) -> float:
    """The loss of both; nan where they have no mean."""
    if weights[0] is None or weights[1] is None:
        return sum(losses)
    total = weights[0] + weights[1]
    counted = [loss * (weight or 0.0) for loss, weight in zip(losses, weights, strict=True) if weight]
    return sum(counted) / total if total else math.nan


def _weighed(part: _MicrobatchRows) -> str:
    return f"{part.loss:.7g}" + ("" if part.weight is None else f" (weighing {part.weight:g})")


def _tensors(value: Any) -> Iterator[Tensor]:
    yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0


def _is_coarse(kind: torch.dtype) -> bool:
    return kind.is_floating_point and torch.finfo(kind).eps >= COARSE


def _widened(value: Tensor) -> Tensor:
    return value.to(WIDE) if _is_coarse(value.dtype) else value


class _Kinds(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dtypes of what is computed inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.seen.update(each.dtype for each in _tensors(made))
        return made
