"""Parameters and buffers whose values are on another rank: the objects stay, without memory, and a use is an error.

On processes a rank trains what its own stages hold. What the model has beside that would grow old in silence: a call of
the model, its `state_dict()`, a norm over its parameters would mix values of today with those of the first step. So
these tensors are let go in place, wherever they stand, and give their memory back. Shape, type and device can still be
asked for, and there is no gradient: `.grad` is None, so that `zero_grad()` and an optimizer of `model.parameters()`
pass it over. All else raises an error that names where the values are, and so does torch's clipping by norms, which
would take this rank's part for the whole.

The code between the units of a model that is cut by its forward runs on every stage, and may compute with such a tensor
as long as nothing of this stage depends on the result. There one element, expanded, takes its place, and `stand_ins`
hears of it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from penstock.errors import ModelError
from penstock.model.run_kind import EVERYWHERE, run_kind

# These say something about a tensor, and nothing of its values; so do attributes that are no tensors.
_ABOUT: frozenset[Any] = frozenset({
    Tensor.dim, Tensor.element_size, Tensor.get_device, Tensor.is_complex, Tensor.is_floating_point,
    Tensor.is_inference, Tensor.is_signed, Tensor.ndimension, Tensor.nelement, Tensor.numel, Tensor.requires_grad_,
    Tensor.size, Tensor.__len__, Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
})  # fmt: skip
_GRAD: Any = Tensor.grad
_GRADIENT: frozenset[Any] = frozenset({_GRAD.__get__, _GRAD.__set__})
_CLIPPING = "torch.nn.utils.clip_grad"
_bare: Any = torch._C.DisableTorchFunctionSubclass

stand_ins = threading.local()  # `stand_ins.add`: hears of each tensor that takes the place of one that is away


@dataclass(frozen=True)
class Home:
    """Where the values of a tensor are."""

    name: str  # Its name in the whole model.
    rank: int
    stage: int
    sharded: bool = False  # Set if this pipeline has divided it into other tensors.

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage})"

    def error(self) -> ModelError:
        """Make the error for a use of the tensor itself."""
        if self.sharded:
            return ModelError(
                f"{self.name} was sharded: its values are in pipe.parameters(), a part on each rank, and this tensor "
                f"would grow old; use the pipeline, or call pipe.full_state_dict() on every rank for all values"
            )
        return ModelError(
            f"{self.name} is not in this process: its values are on {self}, because from the first step on each "
            f"process holds those of its own stages only. Use the pipeline in the model's place (an optimizer of "
            f"pipe.parameters(), pipe.zero_grad(), pipe.clip_grad_norm_(), pipe.evaluate(), pipe.predict()), or call, "
            f"on every rank, pipe.full_state_dict() for all values or pipe.fill_model() to have them in the model "
            f"again. With Pipeline(keep_model=True) the model keeps the values that it had before the first step"
        )


class _Away:
    """Mixed into the class of a tensor that is let go."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _GRADIENT:
            if _has_no_gradient(*args):
                return None
        elif func in _ABOUT or func.__name__ == "__get__":
            with _bare():
                found = func(*args, **kwargs)
            if not isinstance(found, Tensor) or found is args[0]:
                return found
        if run_kind() == EVERYWHERE:
            args, kwargs = pytree.tree_map_only(_Away, _stand_in, (args, kwargs))
            return func(*args, **kwargs)
        gone = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Away))
        raise _STATES[gone].home.error()

    def __repr__(self) -> str:
        home = _STATES[self].home
        return f"{home.name}, a tensor of shape {tuple(self.shape)} whose values are on {home}"  # type: ignore[attr-defined]


def _has_no_gradient(tensor: Tensor, value: Any = None) -> bool:
    """Return whether None is right for the gradient, as what is read or what is set.

    Of a sharded tensor there is one, in its shards. For torch's clipping, whose code is two frames further up, the
    gradients that are elsewhere count as well.
    """
    clips = sys._getframe(2).f_globals.get("__name__") == _CLIPPING
    return value is None and not clips and not _STATES[tensor].home.sharded


@dataclass(frozen=True)
class _Released:
    home: Home
    kind: type[Tensor]  # the class that it had
    stride: tuple[int, ...] | None  # Strides that it had in memory; None: it still has them.
    # Where in a cache line it started: kernels may round by that, so it starts there again.
    phase: int = 0


_STATES: Any = WeakTensorKeyDictionary()


@functools.cache
def _away_kind(kind: Any) -> Any:
    return type(kind)(f"Away{kind.__name__}", (_Away, kind), {"__module__": __name__})


def is_away(tensor: Any) -> bool:
    return isinstance(tensor, _Away)


def home_of(tensor: Tensor) -> Home | None:
    """Return where the values of a tensor are, if that is not here; also for one that was kept, and is old."""
    state = _STATES.get(tensor)
    return None if state is None else state.home


def mark_kept(tensor: Tensor, home: Home) -> None:
    """Keep the tensor as it is, though its values are elsewhere."""
    _STATES[tensor] = _Released(home, type(tensor), None)


def let_go(tensor: Tensor, home: Home, stride: tuple[int, ...] | None = None) -> None:
    """Give the memory of a tensor back; from now on a use of it is an error. `stride`: what it shall have again."""
    if is_away(tensor):
        _STATES[tensor] = replace(_STATES[tensor], home=home)
        return
    kind, phase = type(tensor), 0
    if kind in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_inference():
        phase = tensor.data_ptr() % 64
        stride = tensor.stride() if stride is None else stride
        tensor.grad = None
        tensor.data = one_element(tensor, tensor.device, float("nan"))  # for whoever reads it all the same
    _STATES[tensor] = _Released(home, kind, stride, phase)
    tensor.__class__ = _away_kind(kind)


def take_back(tensor: Tensor) -> Tensor:
    """Make the tensor usable again. It has memory, and whatever is in there: the caller fills it."""
    state = _STATES.pop(tensor, None)
    if is_away(tensor) and state is not None:
        tensor.__class__ = state.kind
        if state.stride is not None:
            tensor.data = _memory(tensor, state.stride, state.phase // tensor.element_size())
    return tensor


def _memory(tensor: Tensor, stride: tuple[int, ...], skipped: int) -> Tensor:
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    if not skipped:
        return torch.empty_strided(tensor.shape, stride, **options)
    reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    return torch.empty(skipped + reach, **options).as_strided(tensor.shape, stride, skipped)


@contextmanager
def with_memory(model: nn.Module) -> Iterator[None]:
    """Give all tensors of a model memory inside, for code that reads none of their values.

    It is never touched, so that the system need not provide it.
    """
    gone = [(each, _STATES[each]) for each in (*model.parameters(), *model.buffers()) if is_away(each)]
    try:
        for tensor, _ in gone:
            take_back(tensor)
        yield
    finally:
        for tensor, state in gone:
            let_go(tensor, state.home)


def blank(tensor: Tensor, device: torch.device) -> Tensor:
    """Return zeros of the shape and type of a tensor, whether or not it is away."""
    if is_away(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.zeros_like(tensor, device=device)


def one_element(like: Any, device: torch.device, value: float = 0.0) -> Tensor:
    """Return a tensor of the shape and type of `like` with the memory of one element; only floats have the value."""
    value = value if like.dtype.is_floating_point or like.dtype.is_complex else 0
    return torch.full((), value, dtype=like.dtype, device=device).expand(like.shape)


def _stand_in(tensor: Tensor) -> Tensor:
    made = one_element(tensor, tensor.device)
    add: Callable[[list[Tensor]], None] | None = getattr(stand_ins, "add", None)
    if add is not None:
        add([made])
    return made
