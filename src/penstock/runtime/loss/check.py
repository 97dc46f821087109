"""Whether the losses of microbatches make the loss of the batch, asked of the loss itself, again and again.

If they do not, the loss is a mean over something else, or a sum, or it compares rows with each other; then neither the
batch's loss nor its gradients would be those of the whole batch, and that is an error with both numbers. Two things
find it out. What a loss is divided by is read off its graph at every microbatch (`reading`, `BatchShares.check`). And
here the loss is called on two microbatches taken together, once more, without gradients: on all neighbours in the first
step, and whenever the loss computes something that it has not computed before; on one pair by turns in later steps.

Nothing waits for a device: all numbers are looked at when the step ends.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pickle import PickleError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.devices import device_types
from penstock.errors import ModelError
from penstock.model.random_states import global_states, put_back
from penstock.runtime.batch.microbatch import Batch, Dims, dims_of_leaves
from penstock.runtime.batch.rowed import is_rowed
from penstock.runtime.loss.losses import check_loss
from penstock.runtime.loss.module import module_of
from penstock.runtime.loss.reading import Form, Names, names_below

if TYPE_CHECKING:
    from penstock.runtime.loss.shares import BatchShares, Weighing

APART = 256  # microbatches from one pair that is taken together to the next, so that it costs less than 1 % of a step
UNREAD = 4  # So many times more often where the graph of a loss does not show all of it.
KINDS = 16  # of losses by what they compute; one that computes something else each time is not asked each time
FEW = 64  # roundings that two numbers may be apart
ADDED = 1e-6  # what people add to a divisor so that it is not 0, beside it
FEW_OF_COARSE, COARSE = 4, 1e-4  # and of numbers that are coarser than this
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)  # of a loss, if it takes
# rows of one microbatch only, or what was joined is no row


Kind = tuple[Form | None, Names | None, *tuple[str, ...]]  # of a loss: what it computes, and of which loss_kwargs


class CannotJoinError(Exception):
    """Two microbatches that cannot be joined."""


class CannotCopyError(CannotJoinError):
    """A loss that cannot be called without a trace."""


class DrawsError(CannotJoinError):
    """A loss that is another one each time."""


class LossCheck:
    """The check of one loss, over all steps."""

    def __init__(self, weighing: Weighing, dims: Dims) -> None:
        self.weighing, self.dims = weighing, dims
        self._steps = {True: 0, False: 0}  # that have passed: of training, and evaluations
        self._kinds: set[Kind] = set()  # of what the loss computes
        self._is_read = True  # Its graph shows all that it computes in training.

    def begin(self, batch: Batch, shares: BatchShares, training: bool) -> StepCheck | None:
        """Return the check of a step; None where the loss is known, or there is nothing to compare."""
        if self.weighing.loss_fn is None or not self.weighing.is_checked or len(batch.args) < 2:
            return None
        pairs, step = len(batch.args) - 1, self._steps[training]
        apart = APART if self._is_read else APART // UNREAD
        turn, left = divmod(step, max(1, apart // len(batch.args)))
        return StepCheck(self, batch, shares, range(pairs) if not step else () if left else (turn % pairs,), training)

    def is_new(self, kind: Kind) -> bool:
        """Whether the loss has not computed this before."""
        return kind not in self._kinds and len(self._kinds) < KINDS

    def passed(self, training: bool, kinds: set[Kind]) -> None:
        """Count a step whose losses are right."""
        self._steps[training] += 1
        if training:
            self._is_read &= all(form is not None and form.is_complete for form, *_ in kinds)
        self._kinds |= kinds


class _Given(NamedTuple):
    """What the loss of one microbatch is called with."""

    number: int
    rows: int
    output: Any
    target: Any
    extra: Mapping[str, Any]


class _Together(NamedTuple):
    """Two microbatches, and their loss together."""

    one: int
    two: int
    loss: Tensor
    swapped: Tensor  # the same with the rows in another order: how large rounding is
    largest: list[Tensor]  # numbers that the loss was given
    eps: float


class StepCheck:
    """The check of one step. `due`: the places, in the order of forwards, of microbatches that go with the next one."""

    def __init__(
        self, checks: LossCheck, batch: Batch, shares: BatchShares, due: range | tuple[int, ...], training: bool
    ) -> None:
        self._checks, self._batch, self._shares, self._training = checks, batch, shares, training
        self._due = set(due)
        self._before: _Given | None = None
        self._seen: set[int] = set()
        self._kinds: set[Kind] = set()
        self._together: list[_Together] = []

    def saw(self, number: int, output: Any, loss: Tensor, form: Form | None) -> None:
        """Take the output and the loss of a microbatch, in its forward."""
        if number in self._seen:  # it is recomputed
            return
        batch, place, weighing = self._batch, len(self._seen), self._checks.weighing
        self._seen.add(number)
        target, extra = batch.targets[number], batch.loss_kwargs[number]
        kind: Kind = (form, names_below(loss, output) if place == 0 else None, *extra)
        if kind not in self._kinds:
            self._kinds.add(kind)
            if self._checks.is_new(kind):
                self._due |= {place - 1, *range(place, len(batch.args) - 1)}
        before, self._before = self._before, None
        if before is None and place not in self._due:
            return
        try:
            if batch.rows is None:
                raise CannotJoinError("nothing says how many rows they have")
            output, target, extra = pytree.tree_map_only(Tensor, Tensor.detach, (output, target, dict(extra)))
            mine = _Given(number, batch.rows[number], output, target, extra)
            self._before = mine if place in self._due else None
            if before is not None:
                self._compare(before, mine, loss.dtype)
        except DrawsError:
            weighing.draws, self._due, self._before = True, set(), None
            weighing.cannot_tell("it draws random numbers")
        except CannotJoinError as error:
            if self._training and (form is None or not form.is_complete or isinstance(error, CannotCopyError)):
                weighing.cannot_tell(str(error))

    def _compare(self, one: _Given, two: _Given, kind: torch.dtype) -> None:
        together, swapped = self._join(one, two), self._join(two, one)
        floats = [
            each
            for each in pytree.tree_leaves(together)
            if isinstance(each, Tensor) and each.is_floating_point() and each.numel()
        ]
        kinds = {each.dtype for each in floats} | {kind}
        kinds |= {torch.get_autocast_dtype(each) for each in device_types() if torch.is_autocast_enabled(each)}
        eps = max(torch.finfo(each).eps for each in kinds if each.is_floating_point)
        losses = _untouched(self._checks.weighing.loss_fn, (together, swapped))
        with torch.no_grad():
            largest = [_whole(each).abs().amax() for each in floats]
        self._together.append(_Together(one.number, two.number, losses[0], losses[1], largest, eps))

    def _join(self, one: _Given, two: _Given) -> tuple[Any, Any, dict[str, Any]]:
        if one.extra.keys() != two.extra.keys():
            raise CannotJoinError("microbatches have different loss_kwargs")
        rows, dims = (one.rows, two.rows), self._checks.dims

        def joined(label: str, a: Any, b: Any) -> Any:
            leaves, specs = zip(*(pytree.tree_flatten(each, is_leaf=is_rowed) for each in (a, b)), strict=True)
            if specs[0] != specs[1]:
                raise CannotJoinError(f"microbatches differ in the structure of their {label}")
            places = dims_of_leaves(label, dims.get(label, 0), a, len(leaves[0]))
            found = [_join_leaf(label, x, y, dim, rows) for x, y, dim in zip(*leaves, places, strict=True)]
            return pytree.tree_unflatten(found, specs[0])

        return (
            joined("output", one.output, two.output),
            joined("target", one.target, two.target),
            {name: joined(name, one.extra[name], two.extra[name]) for name in one.extra},
        )

    # -- when the step ends

    @property
    def tensors(self) -> list[Tensor]:
        """The numbers that are still to be looked at."""
        return [value for each in self._together for value in (each.loss, each.swapped, *each.largest)]

    def judge(self, numbers: dict[int, float], losses: Mapping[int, float]) -> None:
        """Raise if two microbatches have another loss together than their own losses make."""
        for each in self._together:
            self._judge(each, numbers, losses)

    def passed(self) -> None:
        """Count the step: its losses are right."""
        self._checks.passed(self._training, self._kinds)

    def _judge(self, pair: _Together, numbers: dict[int, float], losses: Mapping[int, float]) -> None:
        both = (pair.one, pair.two)
        own, weights = [losses[number] for number in both], [self._shares.weight(number) for number in both]
        expected, found = _expected(own, weights), numbers[id(pair.loss)]
        if math.isinf(expected) or weights == [0, 0] or not math.isfinite(found):
            return  # a batch without a mean is refused elsewhere (`shares`)
        few = FEW if pair.eps < COARSE else FEW_OF_COARSE
        scale = max(abs(found), *(abs(loss) for loss, weight in zip(own, weights, strict=True) if weight != 0))
        if abs(found - expected) <= max(few * pair.eps, ADDED) * scale:
            return
        if math.isfinite(expected):
            # signed terms may cancel, so that rounding is large beside their mean: the rows in another order show it
            noise = abs(numbers[id(pair.swapped)] - found)
            largest = max((numbers[id(each)] for each in pair.largest), default=0.0)
            if abs(found - expected) <= min(few * noise, max(math.sqrt(pair.eps) * scale, few * pair.eps * largest)):
                return
        words = [
            f"{loss:.7g}" + ("" if weight is None else f" (weighing {weight:g})")
            for loss, weight in zip(own, weights, strict=True)
        ]
        raise disagreement(
            f"the loss of microbatches {pair.one} and {pair.two} taken together is {found:.7g}, but their own, "
            f"{words[0]} and {words[1]}, make {expected:.7g}",
            adds=abs(found - sum(own)) <= few * pair.eps * scale,
        )


def disagreement(what: str, adds: bool) -> ModelError:
    """Return the error for losses of microbatches that do not make the batch's."""
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


def _expected(losses: list[float], weights: list[float | None]) -> float:
    """Return the loss that two make; nan where they have no mean."""
    if None in weights:
        return sum(losses)
    total = sum(weight or 0.0 for weight in weights)
    counted = [loss * (weight or 0.0) for loss, weight in zip(losses, weights, strict=True) if weight]
    return sum(counted) / total if total else math.nan


def _join_leaf(label: str, one: Any, two: Any, dim: int | None, rows: tuple[int, int]) -> Any:
    cannot = CannotJoinError(f"the {label} of microbatches cannot be joined by rows")
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        if one is two or (type(one) is type(two) and isinstance(one, (int, float, str)) and one == two):
            return one
        raise cannot
    if one.is_nested or two.is_nested or one.layout is not torch.strided:
        raise cannot
    along = dim or 0
    same = one.shape == two.shape
    blocks = [0, 0]  # entries for each row
    if dim is not None and one.dim() and one.dim() == two.dim():
        # what all microbatches share is at one place; and so are pieces of an expanded row
        shared = same and one.numel() and one.data_ptr() == two.data_ptr() and one.stride(dim) != 0
        each = zip((one, two), rows, strict=True)
        blocks = [0, 0] if shared else [0 if leaf.shape[dim] % r else leaf.shape[dim] // r for leaf, r in each]
    if blocks != [1, 1] and same and type(one) is type(two) is Tensor:
        # other tensors are not compared: all ranks would have to, or the device be waited for
        equal = one.data_ptr() == two.data_ptr() or (one.device.type == "cpu" and torch.equal(one, two))
        if equal:
            return one
    if blocks[0] != blocks[1] or not blocks[0] or one.narrow(along, 0, 0).shape != two.narrow(along, 0, 0).shape:
        raise cannot
    return torch.cat([one, two], along)


def _whole(value: Tensor) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def _untouched(loss_fn: Callable[..., Any] | None, given: Sequence[tuple[Any, Any, dict[str, Any]]]) -> list[Tensor]:
    """Call a loss without a trace: a module is called on a copy, and random numbers are put back."""
    assert loss_fn is not None
    before = global_states()
    try:
        with torch.no_grad():
            losses = [
                check_loss(_twin(loss_fn)(output, target, **extra)).detach().clone() for output, target, extra in given
            ]
    except FAILURES as error:
        raise CannotJoinError(f"it raised {type(error).__name__} ({error}) for two microbatches together") from None
    finally:
        drew = not _same(before, global_states())
        if drew:
            put_back(before)
    if drew:
        raise DrawsError
    return losses


def _same(before: Any, after: Any) -> bool:
    (python, numpy, torchs), (python_after, numpy_after, torchs_after) = before, after
    if numpy is not None and (numpy[2:] != numpy_after[2:] or (numpy[1] != numpy_after[1]).any()):
        return False
    tensors = zip((torchs[0], *torchs[1]), (torchs_after[0], *torchs_after[1]), strict=True)
    return bool(python == python_after) and all(torch.equal(*each) for each in tensors)


def _twin(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss that is a module, or a method of one, with a state of its own: only parameters are shared."""
    module = module_of(loss_fn)
    if not isinstance(module, nn.Module):
        return loss_fn
    # What it keeps of its last call, such as a term to be logged, has a graph, which torch does not copy.
    kept = [each for each in pytree.tree_leaves(list(map(vars, module.modules()))) if isinstance(each, Tensor)]
    known = {id(tensor): tensor.detach().clone() for tensor in kept if tensor.grad_fn is not None}
    known |= {id(parameter): parameter for parameter in module.parameters()}
    try:
        return copy.deepcopy(loss_fn, known)
    except (*FAILURES, PickleError) as error:
        raise CannotCopyError(f"it cannot be copied ({type(error).__name__}: {error})") from None
