"""What a microbatch holds of a stage between its forward and its backward: edges of the graph, and no outputs.

The gradients of what arrived go back as they come out of the graph. Autograd would accumulate them into the leaves,
and lays them anew then where their strides are not the leaf's: a sum over a transposed gradient is taken in another
order than over a contiguous one, so the stage before would compute other last bits than in a plain loop. A hook of
each leaf therefore keeps what would not be taken over as it is.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from penstock.errors import RunError
from penstock.model.part import OUTPUT
from penstock.runtime.backward.deferred_weights import DeferredWeights
from penstock.runtime.state.memory_layout import LINE, copy_like, is_dense, storage_of, with_copies
from penstock.runtime.state.ownership import ONE_HOLDER, holders, use_count

_ENGINE = torch.autograd.Variable._execution_engine
_WRITTEN_IN_PYTHON: Any = torch._C._FunctionBase  # nodes of autograd.Function: their object does not keep the graph


class GatheredForward(NamedTuple):
    """A forward on all microbatches at once: what its backward needs to tell them apart."""

    # By producer and microbatch: which tensors want a gradient.
    wants: dict[int, list[list[bool]]]
    loss: Tensor | None


class SavedGraph:
    """What a microbatch holds between its forward and its backward."""

    __slots__ = (
        "_hooks",
        "_unaligned",
        "deferred",
        "extra",
        "gathered",
        "leaves",
        "loss",
        "microbatch",
        "recompute",
        "roots",
    )

    def __init__(self, microbatch: int, arrived: Mapping[int, Any]) -> None:
        self.microbatch = microbatch
        # Arrived tensors that want a gradient, by producing stage.
        self.leaves = leaves = {stage: tensors_with_gradient(payload) for stage, payload in arrived.items()}
        # By id of the leaf: gradients whose strides autograd would change.
        self._unaligned: dict[int, Tensor] = {}
        self._hooks = [_hook_leaf(leaf, self._unaligned) for group in leaves.values() for leaf in group]
        self.roots: dict[int, list[GradientEdge]] = {}  # Indexed by consuming stage.
        self.loss: GradientEdge | None = None
        self.extra: list[GradientEdge] = []
        self.deferred: DeferredWeights | None = None
        # Runs the forward again where its graph was thrown away.
        self.recompute: Callable[[SavedGraph], None] | None = None
        self.gathered: GatheredForward | None = None  # Set where it is of all microbatches in one.

    def end_forward(
        self, emitted: Mapping[int, Any], loss: Tensor | None, extra: Sequence[tuple[str, Tensor]], attached: bool
    ) -> None:
        """Keep the edges at which the backward begins. `attached`: the output's gradient comes from the user."""
        for target, payload in emitted.items():
            if target != OUTPUT or attached:
                self.roots[target] = [_edge_of(tensor) for tensor in tensors_with_gradient(payload)]
        if loss is not None and loss.requires_grad:
            self.loss = _edge_of(loss)
        if extra:
            self.extra = [_edge_of(value) for _, value in extra if value.requires_grad]

    def backward(
        self,
        gradients: Mapping[int, Sequence[Tensor | None]],
        loss_seed: Tensor | None,
        extra_seed: Tensor | None,
        run: RunBackward,
    ) -> dict[int, list[Tensor | None]]:
        """Take gradients by consumer, return gradients by producer (None where there is none)."""
        roots, entering = self._root_gradients(gradients, loss_seed, extra_seed)
        self._unaligned.clear()  # the forward may have taken gradients itself
        for hooks in self._hooks:
            if len(hooks) > 1:  # hooks of the stage's own, which may change a gradient, go first
                hooks[_OUR_HOOK] = hooks.pop(_OUR_HOOK)  # torch takes them as a plain dict has them
        if roots:
            run(self, roots, entering)
        back = self._take_gradients()
        _fit_gradients(back, entering)
        return back

    def _root_gradients(
        self,
        gradients: Mapping[int, Sequence[Tensor | None]],
        loss_seed: Tensor | None,
        extra_seed: Tensor | None,
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the graph's roots and the gradient that enters at each; without one a root takes no part."""
        roots: list[GradientEdge] = []
        entering: list[Tensor] = []
        # a value with several readers gets their gradients in the order of a plain loop: the last reader's first
        readers = sorted(self.roots, reverse=True) if len(self.roots) > 1 else self.roots
        for target in readers:
            arrived, edges = gradients[target], self.roots[target]
            if len(arrived) != len(edges):
                raise RunError(
                    f"microbatch {self.microbatch}: {len(arrived)} gradients came back from stage {target} for "
                    f"{len(edges)} tensors that want one"
                )
            for edge, gradient in zip(edges, arrived, strict=True):
                if gradient is not None:
                    roots.append(edge)
                    entering.append(gradient)
        if self.loss is not None and loss_seed is not None:
            roots.append(self.loss)
            entering.append(loss_seed)
        for edge in self.extra:
            assert extra_seed is not None
            roots.append(edge)
            entering.append(extra_seed.clone())  # one of all would be added to by a leaf that adopts it
        return roots, entering

    def _take_gradients(self) -> dict[int, list[Tensor | None]]:
        """Return what goes back to each producing stage, by its leaves; None where there is none."""
        unaligned, back = self._unaligned, dict[int, list[Tensor | None]]()
        for stage, leaves in self.leaves.items():
            back[stage] = [unaligned.pop(id(leaf), leaf.grad) if unaligned else leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
        return back


# Takes what was recorded, roots and seeds.
RunBackward = Callable[[SavedGraph, list[GradientEdge], list[Tensor]], None]

_OUR_HOOK = -1  # among the hooks of a tensor, which are numbered from 0 on


class _KeepGradient:
    """The hook of one leaf."""

    __slots__ = ("place", "stride", "unaligned")
    __torch_unserializable__ = True  # a stage may save what it is given, and is not warned that hooks stay behind

    def __init__(self, place: int, stride: tuple[int, ...] | None, unaligned: dict[int, Tensor]) -> None:
        self.place, self.stride, self.unaligned = place, stride, unaligned

    def __call__(self, gradient: Tensor) -> None:
        if gradient.layout is torch.strided and (gradient.stride() != self.stride or gradient.data_ptr() % LINE):
            self.unaligned[self.place] = gradient


def _hook_leaf(leaf: Tensor, unaligned: dict[int, Tensor]) -> OrderedDict[int, _KeepGradient]:
    """Hook a leaf as `register_hook` does, which takes three times as long."""
    hooks = OrderedDict(
        {
            _OUR_HOOK: _KeepGradient(
                id(leaf), leaf.stride() if leaf.is_contiguous() or is_dense(leaf) else None, unaligned
            )
        }
    )
    leaf._backward_hooks = hooks  # type: ignore[assignment]
    return hooks


def tensors_with_gradient(value: Any) -> list[Tensor]:
    """Return the tensors of a payload that want a gradient, in the order both ends agree on."""
    if type(value) is Tensor:
        return [value] if value.requires_grad else []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def ends_of_graph(
    emitted: Mapping[int, Any], loss: Tensor | None, extra: Sequence[tuple[str, Tensor]], attached: bool
) -> list[Tensor]:
    """Return the tensors whose edges `SavedGraph.end_forward` keeps."""
    leaving = [payload for target, payload in emitted.items() if target != OUTPUT or attached]
    losses = [] if loss is None else [loss]
    return [*chain(*map(tensors_with_gradient, leaving)), *losses, *(value for _, value in extra)]


def _edge_of(tensor: Tensor) -> GradientEdge:
    """Do what `get_gradient_edge` does, without its questions where the answer is plain: an ordinary node of autograd's
    own.
    """
    node = tensor.grad_fn
    if node is None or isinstance(node, _WRITTEN_IN_PYTHON):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


# -- whose memory a gradient is in: see `state/ownership`


class FreshGradients:
    """The parameters of a stage that have no gradient yet: the one that they get must be in memory of their own.

    Autograd lets a parameter adopt the gradient that arrives, also a view of one that is kept or sent elsewhere, and
    the gradients of later microbatches are then added into that memory.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.by_hook: set[nn.Parameter] = set()  # parameters that are seen to by `own_by_hook`
        self._trained: list[nn.Parameter] | None = None  # None: this step has not gone back yet
        self._waiting: list[nn.Parameter] = []

    def begin_step(self) -> None:
        """Begin a step: parameters may have been replaced or frozen since the last one."""
        self._trained = None

    def before(self) -> None:
        """Look at gradients ahead of a backward; each time, because hooks of the user's own may clear them within a
        step.
        """
        if self._trained is None:
            trained = (each for each in self._module.parameters() if each.requires_grad)
            self._trained = [each for each in trained if each not in self.by_hook]
        self._waiting = [each for each in self._trained if each.grad is None]

    def after(self) -> None:
        """Copy, behind a backward, what the parameters have adopted from others."""
        for parameter in self._waiting:
            gradient = parameter.grad
            if gradient is not None and _has_others(gradient):
                parameter.grad = copy_like(gradient)

    def run(self, weights: Callable[[], None]) -> None:
        """Run W: accumulate the weight gradients that were put off."""
        self.before()
        weights()
        self.after()

    def run_backward(self, graph: SavedGraph, roots: list[GradientEdge], seeds: list[Tensor]) -> None:
        """Do what `torch.autograd.backward` does, without its questions about tensors that are edges here."""
        self.before()
        _ENGINE.run_backward(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)
        self.after()


def own_by_hook(fresh: Sequence[FreshGradients]) -> list[RemovableHandle]:
    """Do the same for stages on several threads, of the parameters that they share.

    Between a look at a gradient and its copy another thread could add to it, so these are copied on their way in.
    """
    uses = Counter(each for one in fresh for each in one._module.parameters())
    shared = {parameter for parameter, count in uses.items() if count > 1}
    for one in fresh:
        one.by_hook = shared
    trained = [parameter for parameter in shared if parameter.requires_grad]
    return [parameter.register_hook(_own) for parameter in trained]  # type: ignore[no-untyped-call]


def _own(gradient: Tensor) -> Tensor | None:
    return copy_like(gradient) if _has_others(gradient) else None


def _is_ordinary(gradient: Tensor) -> bool:
    """Return whether a gradient is an ordinary tensor with strides; it is never a parameter."""
    return type(gradient) is Tensor and gradient.layout is torch.strided


def _has_others(gradient: Tensor) -> bool:
    return _is_ordinary(gradient) and (holders(gradient) > 1 or _is_a_part(gradient))


def _is_a_part(tensor: Tensor) -> bool:
    """Return whether the storage holds more than this tensor."""
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def _references_of_listed() -> int:
    """Return how many references Python counts in `_fit_gradients` for a gradient that nothing else refers to."""
    gradients = [torch.empty(0, device="cpu")]
    for gradient in gradients:
        return sys.getrefcount(gradient)
    raise AssertionError


_LISTED = _references_of_listed()


def _fit_gradients(back: Mapping[int, list[Tensor | None]], arrived: Sequence[Tensor]) -> None:
    """Copy those of the gradients that go back which others hold; `arrived`: those that this backward began with."""
    for gradients in back.values():
        for gradient in gradients:
            if gradient is None or not _is_ordinary(gradient):
                continue
            if sys.getrefcount(gradient) > _LISTED or use_count(gradient.untyped_storage()._cdata) > ONE_HOLDER:
                break
        else:
            continue
        break
    else:
        return
    del gradient
    passed = {id(each): each for each in arrived if _is_ordinary(each)}
    leaving = {id(each): each for each in (*chain(*back.values()), *arrived) if each is not None and _is_ordinary(each)}
    known = Counter(map(storage_of, leaving.values()))
    del leaving
    for gradients in back.values():
        places = []
        for place, gradient in enumerate(gradients):
            if (
                gradient is not None
                and _is_ordinary(gradient)
                and (
                    holders(gradient) > known[storage_of(gradient)]
                    or (id(gradient) not in passed and sys.getrefcount(gradient) > _LISTED)
                )
            ):
                places.append(place)
        if places:
            gradients[:] = with_copies(gradients, places)[0]
