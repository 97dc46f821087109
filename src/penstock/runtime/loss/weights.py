"""What each microbatch weighs in the mean over its batch: rows, what the user counts, or the entries of a target.

A mean of means is the mean over all only if each counts by what it is a mean over. Torch's cross-entropy is a mean over
the targets that are not ignored, each by the weight of its class; so that is what its microbatches weigh, and one whose
targets are all ignored (its own mean is nan) weighs nothing.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, UsageError
from penstock.runtime.batch.microbatch import Batch

Label = tuple[str, str | int, int]  # where in a microbatch: the field, the name or position there, the leaf
Mark = tuple[Label, str]  # a tensor of the batch, and a kind of mark that counts there
UNEVEN = 1e-6  # above what sums of the same numbers differ by


class Measure(Protocol):
    """What microbatches are measured by. None: their losses add up."""

    def __call__(self, batch: Batch) -> list[float] | None:
        """The weight of each microbatch."""

    def __str__(self) -> str:
        """What is counted, in words."""


class _MeanOverRows:
    """A mean over rows; where nothing says how many there are, all microbatches count alike."""

    def __call__(self, batch: Batch) -> list[float]:
        return [1.0] * len(batch.args) if batch.rows is None else [float(rows) for rows in batch.rows]

    def __str__(self) -> str:
        return "rows"


class _LossesAddUp:
    def __call__(self, batch: Batch) -> None:
        return None

    def __str__(self) -> str:
        return "a sum"


ROWS, SUM = _MeanOverRows(), _LossesAddUp()


def as_plain(measure: Measure | None) -> Any:
    """A measure that was found out, in plain values that can be told to others."""
    if not isinstance(measure, Entries):
        return None if measure is None else str(measure)
    classes = None if measure.classes is None else measure.classes.tolist()
    return [list(measure.place), measure.shift, measure.ignored, classes]


def from_plain(said: Any) -> Measure:
    """The measure that was told."""
    if isinstance(said, str):
        return SUM if said == str(SUM) else ROWS
    place, shift, ignored, classes = said
    weights = None if classes is None else torch.tensor(classes, dtype=torch.float64)
    return Entries((place[0], place[1], place[2]), shift, ignored, weights)


# -- what the user counts


class Counted:
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
    counted = valid.to(torch.float64)
    if classes is not None and flat.numel():
        places = flat.where(valid, 0).clamp(0, len(classes) - 1)
        counted = counted * classes.detach().to(flat.device, torch.float64)[places]
    return _sums(counted, pieces)


def uneven_marks(batch: Batch) -> set[Mark]:
    """What may say what counts, and some microbatches have more of than others."""
    found: set[Mark] = set()
    for place, _ in telling(batch, 0):
        pieces = [at(batch, number, place) for number in range(len(batch.args))]
        if all(isinstance(piece, Tensor) for piece in pieces):
            for kind, shares in marks([piece.detach().reshape(-1) for piece in pieces]).items():
                if max(shares) - min(shares) > UNEVEN * max(map(abs, shares)):
                    found.add((place, kind))
    return found


def marks(pieces: list[Tensor]) -> dict[str, list[float]]:
    """By kind of mark, the share of each piece's entries that have it: what often means "ignored", or how much counts.

    That is 0 in masks and of padding, numbers below 0, 255 in images, nan; and the mean, of weights and lengths.
    """
    flat = torch.cat(pieces)
    if flat.is_meta:
        return {}
    found = {"0": flat == 0}
    if flat.is_floating_point():
        found |= {"nan": flat.isnan(), "mean": flat.nan_to_num()}
    else:
        found |= {"below 0": flat < 0, "255": flat == 255, "mean": flat}
    sizes = [max(1, piece.numel()) for piece in pieces]
    return {
        kind: [total / size for total, size in zip(_sums(each, pieces), sizes, strict=True)]
        for kind, each in found.items()
    }


def _sums(flat: Tensor, pieces: list[Tensor]) -> list[float]:
    found: list[float]
    if len({piece.numel() for piece in pieces}) == 1:
        found = flat.view(len(pieces), -1).sum(1, dtype=torch.float64).tolist()
        return found
    ends = torch.cat([flat.new_zeros(1, dtype=torch.float64), flat.cumsum(0, dtype=torch.float64)])
    offsets = torch.tensor([0, *(piece.numel() for piece in pieces)]).cumsum(0).to(flat.device)
    found = ends[offsets].diff().tolist()
    return found


def at(batch: Batch, number: int, place: Label) -> Any:
    """One leaf of a microbatch; None where it has no such leaf."""
    field, name, leaf = place
    if field == "target":
        value = batch.targets[number]
    elif field == "args":
        args = batch.args[number]
        value = args[name] if isinstance(name, int) and name < len(args) else None
    else:
        value = getattr(batch, field)[number].get(name)
    leaves = pytree.tree_leaves(value)
    return leaves[leaf] if leaf < len(leaves) else None


def integers(batch: Batch, number: int) -> Iterator[tuple[Label, Tensor]]:
    """The tensors of whole numbers in a microbatch; those that are likely to be targets first."""
    return ((place, each) for place, each in _tensors(batch, number) if not each.is_floating_point())


def telling(batch: Batch, number: int) -> Iterator[tuple[Label, Tensor]]:
    """The tensors of a microbatch that may say what counts: whole numbers, and of fractions what a loss is told."""
    for place, each in _tensors(batch, number):
        field, name, _ = place
        told = field in ("target", "loss_kwargs") or any(word in str(name) for word in ("label", "mask", "weight"))
        if told or not each.is_floating_point():
            yield place, each


def _tensors(batch: Batch, number: int) -> Iterator[tuple[Label, Tensor]]:
    named = [("loss_kwargs", name, value) for name, value in batch.loss_kwargs[number].items()]
    kwargs = sorted(batch.kwargs[number].items(), key=lambda each: not _sounds_like_target(each[0]))
    named += [("kwargs", name, value) for name, value in kwargs]
    fields: list[tuple[str, str | int, Any]] = [("target", "target", batch.targets[number]), *named]
    fields += [("args", place, value) for place, value in reversed(list(enumerate(batch.args[number])))]
    for field, name, value in fields:
        for leaf, each in enumerate(pytree.tree_leaves(value)):
            if isinstance(each, Tensor) and each.dim() and not each.is_complex():
                yield (field, name, leaf), each


def _sounds_like_target(name: str) -> bool:
    return any(word in name for word in ("label", "target"))


# -- torch's own losses


def torch_reduction(loss_fn: Any, more: Mapping[str, Any]) -> str | None:
    """How one of torch's losses reduces, with the keywords that it is called with; None of any other loss."""
    function, options = _unwrapped(loss_fn)
    if isinstance(function, nn.modules.loss._Loss):
        return function.reduction if type(function).__module__ == nn.modules.loss.__name__ else None
    name = getattr(function, "__name__", "")
    if getattr(function, "__module__", None) != F.__name__ or not (
        name.endswith("_loss") or "cross_entropy" in name or name == "kl_div"
    ):
        return None
    options = {**options, **more}
    if options.get("size_average") is not None or options.get("reduce") is not None:  # as in torch 0.4
        return None
    reduction: str = options.get("reduction", "mean")
    return reduction


class CrossEntropy:
    """Torch's own cross-entropy or negative log-likelihood of (output, target)."""

    def __init__(self, options: Callable[[], Mapping[str, Any]]) -> None:
        self._options = options

    def __call__(self, batch: Batch) -> list[float] | None:
        options = {**self._options(), **batch.loss_kwargs[0]}
        if options.get("reduction", "mean") == "sum":
            return None
        if any(not isinstance(target, Tensor) for target in batch.targets):
            return ROWS(batch)  # the loss itself will say what is wrong
        if batch.targets[0].is_floating_point():  # probabilities: a mean over all places, whatever the classes weigh
            return [target.numel() / max(1, target.shape[1] if target.dim() > 1 else 1) for target in batch.targets]
        pieces = [target.reshape(-1) for target in batch.targets]
        return weigh(pieces, options.get("ignore_index", -100), options.get("weight"))

    def __str__(self) -> str:
        return "the targets that are not ignored"


def cross_entropy(loss_fn: Any) -> CrossEntropy | None:
    """What torch's own cross-entropy is a mean over, as a module or a function; None of any other loss."""
    function, options = _unwrapped(loss_fn)
    if isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        plain = type(function).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        if not plain or function._forward_hooks or function._forward_pre_hooks:
            return None
        return CrossEntropy(lambda: {name: getattr(function, name) for name in ("weight", "ignore_index", "reduction")})
    if function in (F.cross_entropy, F.nll_loss) and torch_reduction(loss_fn, {}) is not None:
        return CrossEntropy(lambda: options)
    return None


def _unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """What is called in the end, and the keywords that functools.partial adds; compiled or not."""
    options: dict[str, Any] = {}
    while True:
        if isinstance(loss_fn, functools.partial) and not loss_fn.args:
            options = {**loss_fn.keywords, **options}
            loss_fn = loss_fn.func
            continue
        inner = getattr(loss_fn, "_orig_mod", None) or getattr(loss_fn, "_torchdynamo_orig_callable", None)
        if inner is None:
            return loss_fn, options
        loss_fn = inner
