"""What each microbatch weighs in the mean over its batch: rows, what the user counts, or the entries of a target.

A mean of means is the mean over all only if each counts by what it is a mean over. Torch's cross-entropy is a mean over
the targets that are not ignored, each by the weight of its class; so that is what its microbatches weigh, and one whose
targets are all ignored (its own mean is nan) weighs nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from penstock.devices import widest
from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.loss.losses import is_plain, torch_reduction, unwrapped

Label = tuple[str, str | int, int]  # where in a microbatch: the field, the name or position there, the leaf
SHIFTS = ("", "padded", "dropped")


class Measure(Protocol):
    """What microbatches are measured by. None: their losses add up."""

    def __call__(self, batch: Batch) -> list[float] | None:
        """The weight of each microbatch."""

    def __str__(self) -> str:
        """What is counted, in words."""


# -- what the user counts


class WeightFunction:
    """The user's `LossOptions.weight`: a function of what step() is given, by name, or of the target."""

    def __init__(self, function: Callable[..., Any], names: tuple[str, ...] = ()) -> None:
        self._function = function
        self._names = names  # of the model's positional arguments
        try:
            self._parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            self._parameters = [inspect.Parameter("target", inspect.Parameter.POSITIONAL_ONLY)]

    def __call__(self, batch: Batch) -> list[float]:
        return [_number(number, self._call(batch, number)) for number in range(len(batch.args))]

    def _call(self, batch: Batch, number: int) -> Any:
        given = {**dict(zip(self._names, batch.args[number], strict=False)), **batch.kwargs[number]}
        given.update(batch.loss_kwargs[number])
        if batch.has_target:
            given["target"] = batch.targets[number]
        places: list[Any] = []
        named: dict[str, Any] = {}
        for each in self._parameters:
            by_place = each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            if each.kind is each.VAR_KEYWORD:
                named.update(given)
            elif each.name not in given and by_place and not places and batch.has_target:
                places.append(given["target"])  # the first is the target, if nothing else is called so
            elif each.name in given:
                places += [given.pop(each.name)] if by_place else []
                named |= {} if by_place else {each.name: given.pop(each.name)}
            elif each.default is each.empty and each.kind is not each.VAR_POSITIONAL:
                raise UsageError(
                    f"LossOptions(weight=) reads {each.name!r}, but step() got neither that nor a target on the rank "
                    f"of the last stage; here it is passed {', '.join(sorted(given)) or 'nothing by name'}"
                )
            elif by_place:
                places.append(each.default)
        return self._function(*places, **named)

    def looks_at(self, name: str | int) -> bool:
        """Whether it wants that argument of step(), by its name or position."""
        called = name if isinstance(name, str) else self._names[name] if name < len(self._names) else ""
        return any(each.name == called or each.kind is each.VAR_KEYWORD for each in self._parameters)

    def __str__(self) -> str:
        return "what LossOptions(weight=) counts"


def _number(number: int, value: Any) -> float:
    """What the user's weight says of one microbatch, as a number that a mean can go by."""
    try:
        weight = float(value)
    except (TypeError, ValueError, RuntimeError):  # None, a text, a tensor of several numbers
        weight = math.nan
    if not 0 <= weight < math.inf:
        said = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else repr(value)
        raise ModelError(
            f"LossOptions(weight=) gave {said} for microbatch {number}; it must return one number, 0 or above, such as "
            f"the target's count of valid tokens"
        )
    return weight


# -- the entries of a target


@dataclass(frozen=True)
class Entries:
    """The entries of an integer tensor of the batch other than `ignored`, each by the weight of its class."""

    place: Label
    shift: str = ""  # "", or how a language model moves its labels: "padded" or "dropped"
    ignored: int = -100
    classes: Tensor | None = None

    def __call__(self, batch: Batch) -> list[float]:
        pieces = [self.moved(at(batch, number, self.place)).reshape(-1) for number in range(len(batch.args))]
        return weigh(pieces, self.ignored, self.classes)

    def moved(self, value: Tensor) -> Tensor:
        """As the loss sees it: a token's label is the next token."""
        if not self.shift:
            return value
        later = value[..., 1:]
        return F.pad(later, (0, 1), value=self.ignored) if self.shift == "padded" else later

    def is_there(self, batch: Batch) -> bool:
        """Whether the batch has such a tensor."""
        return isinstance(at(batch, 0, self.place), Tensor)

    def __str__(self) -> str:
        field, name, _ = self.place
        what = "the target" if field == "target" else f"argument {name}" if isinstance(name, int) else repr(name)
        return f"the entries of {what} that are not {self.ignored}"


def weigh(pieces: list[Tensor], ignored: int, classes: Tensor | None) -> list[float]:
    """What the entries of each piece weigh: with one operation on all of them, since a step may have 128."""
    flat = torch.cat(pieces)
    valid = flat != ignored
    wide = widest(flat.device.type)
    counted = valid.to(wide)
    if classes is not None and flat.numel():
        places = flat.where(valid, 0).clamp(0, len(classes) - 1)
        counted = counted * classes.detach().to(flat.device, wide)[places]
    return sums(counted, pieces)


def sums(flat: Tensor, pieces: list[Tensor]) -> list[float]:
    """Return the sum of each piece's part of a tensor that has all pieces in a row."""
    found: list[float]
    wide = widest(flat.device.type)
    if len({piece.numel() for piece in pieces}) == 1:
        found = flat.view(len(pieces), -1).sum(1, dtype=wide).tolist()
        return found
    ends = torch.cat([flat.new_zeros(1, dtype=wide), flat.cumsum(0, dtype=wide)])
    offsets = torch.tensor([0, *(piece.numel() for piece in pieces)], device="cpu").cumsum(0).to(flat.device)
    found = ends[offsets].diff().tolist()
    return found


# -- what a cross-entropy saw, found again in its microbatch


def find_entries(node: Any, batch: Batch, number: int) -> Entries | None:
    """Return how the targets that a likelihood saw follow from what its microbatch was given, if they do."""
    seen, classes, ignored = node._saved_target.detach().reshape(-1), node._saved_weight, node._saved_ignore_index
    ignored -= 2**64 if ignored >= 2**63 else 0  # torch shows it without its sign
    alike: list[Entries] = []
    for place, value in integers(batch, number):
        if value.data_ptr() == seen.data_ptr() and value.numel() == seen.numel():
            return Entries(place, "", ignored, classes)  # it is the same memory
        for shift in SHIFTS if value.dim() > 1 else SHIFTS[:1]:
            found = Entries(place, shift, ignored, classes)
            moved = found.moved(value)
            if moved.numel() == seen.numel() and torch.equal(moved.reshape(-1).to(seen), seen):
                alike.append(found)
    return alike[0] if alike else None


def at(batch: Batch, number: int, place: Label) -> Any:
    """Return one leaf of a microbatch; None where it has no such leaf."""
    field, name, leaf = place
    if field == "target":
        value = batch.targets[number]
    elif field == "args":
        args = batch.args[number]
        value = args[name] if isinstance(name, int) and name < len(args) else None
    else:
        value = getattr(batch, field)[number].get(name)
    leaves = [value] if type(value) is Tensor else pytree.tree_leaves(value)
    return leaves[leaf] if leaf < len(leaves) else None


def integers(batch: Batch, number: int) -> Iterator[tuple[Label, Tensor]]:
    """Yield the tensors of whole numbers in a microbatch; those that are likely to be targets first."""
    named = [("loss_kwargs", name, value) for name, value in batch.loss_kwargs[number].items()]
    kwargs = sorted(batch.kwargs[number].items(), key=lambda each: not ("label" in each[0] or "target" in each[0]))
    named += [("kwargs", name, value) for name, value in kwargs]
    fields: list[tuple[str, str | int, Any]] = [("target", "target", batch.targets[number]), *named]
    fields += [("args", place, value) for place, value in reversed(list(enumerate(batch.args[number])))]
    for field, name, value in fields:
        for leaf, each in enumerate(pytree.tree_leaves(value)):
            if isinstance(each, Tensor) and each.dim() and not each.is_complex() and not each.is_floating_point():
                yield (field, name, leaf), each


# -- torch's own losses


class CrossEntropy:
    """Torch's own cross-entropy or negative log-likelihood of (output, target)."""

    def __init__(self, options: Callable[[], Mapping[str, Any]]) -> None:
        self._options = options

    def __call__(self, batch: Batch) -> list[float] | None:
        options = {**self._options(), **batch.loss_kwargs[0]}
        if options.get("reduction", "mean") == "sum":
            return None
        if any(not isinstance(target, Tensor) for target in batch.targets):
            return batch.row_counts()  # the loss itself will say what is wrong
        if batch.targets[0].is_floating_point():  # probabilities: a mean over all places, whatever the classes weigh
            return [target.numel() / max(1, target.shape[1] if target.dim() > 1 else 1) for target in batch.targets]
        pieces = [target.reshape(-1) for target in batch.targets]
        return weigh(pieces, options.get("ignore_index", -100), options.get("weight"))

    def __str__(self) -> str:
        return "the targets that are not ignored"


def cross_entropy(loss_fn: Any) -> CrossEntropy | None:
    """What torch's own cross-entropy is a mean over, as a module or a function; None of any other loss."""
    function, options = unwrapped(loss_fn)
    if isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        if type(function).forward not in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward) or not is_plain(function):
            return None
        return CrossEntropy(lambda: {name: getattr(function, name) for name in ("weight", "ignore_index", "reduction")})
    if function in (F.cross_entropy, F.nll_loss) and torch_reduction(loss_fn, {}) is not None:
        return CrossEntropy(lambda: options)
    return None
