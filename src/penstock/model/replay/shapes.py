"""What a unit call that is not made here would have returned: shapes, types and plain values.

For arguments like the example's the recording knows. For others (another batch size, another
length) the unit is run once on meta tensors, which compute nothing, and the answer is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.lru_cache import LruCache
from penstock.model.original.placeholders import blank, is_away, one_element
from penstock.model.replay.recording.unit_calls import Leaf, UnitCall, flatten, shapes_of, tensors_in, unflatten
from penstock.model.replay.tree import hollow_copy
from penstock.model.replay.unit_state.sinks import Sinks
from penstock.model.run_kind import DRY, run_as

_FAILURES = (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError, IndexError)


class Shapes:
    """Answers for one model; shared by the stages of a process."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._known: defaultdict[int, LruCache[tuple[list[Any], Any]]] = defaultdict(LruCache)
        self._copies: dict[str, nn.Module] = {}
        self._recorded = True  # what the recording knows still holds

    def forget(self) -> None:
        """Forget what units return, as the model is set to something else."""
        self._recorded = False
        self._known.clear()

    def keep(self) -> None:
        """Make later runs on copies without memory, before parameters are taken apart, as by FSDP."""
        self._copies = self._copies or {
            name: hollow_copy(module, _without_memory) for name, module in self._modules.items()
        }

    def of(
        self, number: int, call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[list[Any], Any]:
        """Return the leaves and structure of what call `number` returns for these arguments, in that mode."""
        module = self._modules[call.unit]
        given = shapes_of((args, kwargs), training)
        if self._recorded and given == call.given:
            return call.leaves, call.spec
        known = self._known[number]
        return known.get(given) or known.put(given, self._run(module, call, given, args, kwargs))

    def _run(self, module: nn.Module, call: UnitCall, given: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
        copied = self._copies.get(call.unit)
        if copied is not None:
            for own, twin in zip(module.modules(), copied.modules(), strict=True):
                twin.training = own.training
            module = copied
        owned = (tensor for module in self._modules.values() for tensor in module.parameters(recurse=False))
        try:
            found = _outcome(module, device, args, kwargs, given[-1], any(map(is_away, owned)))
        except _FAILURES as error:
            raise ModelError(
                f"{call.unit} was recorded for arguments of shapes {call.given[0]} and can be run neither on meta "
                f"tensors nor on zeros for {given[0]} ({type(error).__name__}: {error}); pass an example= of the "
                f"shape that a microbatch has"
            ) from error
        leaves, spec = flatten(found if call.adds else found[0])
        return [_as_on(device, leaf) for leaf in leaves], spec


def _as_on(device: torch.device, leaf: Any) -> Any:
    """Turn what a run on meta tensors returned into what a run on the device itself would have."""
    if isinstance(leaf, Tensor):
        return Leaf(tuple(leaf.shape), leaf.dtype, device)
    return device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf


def _without_memory(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(blank(tensor, torch.device("meta")), requires_grad=tensor.requires_grad)
    return tensor


def _outcome(
    module: nn.Module, device: torch.device, args: Any, kwargs: Any, training: bool, blank_buffers: bool = False
) -> tuple[Any, dict[Any, Any]]:
    """Return a module's output, and what it adds to sinks, without computing them; where that fails, from zeros.

    With `blank_buffers`, for processes that have the values of their own stages only, buffers are zeros too: the owner
    must expect what ranks without their values do, so that it finds out where what it returns depends on them.
    """
    leaves, structure = flatten((args, kwargs))
    there = [torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    meta_args, meta_kwargs = unflatten(there, structure)
    try:
        return _run_copy(module, torch.device("meta"), meta_args, meta_kwargs, training, False)
    except _FAILURES:
        return _run_copy(module, device, args, kwargs, training, blank_buffers)


def _run_copy(
    module: nn.Module, device: torch.device, args: Any, kwargs: Any, training: bool, blank_buffers: bool
) -> tuple[Any, dict[Any, Any]]:
    """Run on a copy with zeros in the place of parameters: stages on other threads may be running the module itself."""

    def fill(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(blank(tensor, device), requires_grad=tensor.requires_grad)
        if blank_buffers or (device.type == "meta" and is_away(tensor)):
            return blank(tensor, device)
        return tensor.detach().to(device, copy=True)

    with torch.no_grad(), run_as(DRY):
        copy = hollow_copy(module, fill)
        copy.training = training
        return Sinks(args, kwargs).run(lambda: copy(*args, **kwargs))


def shapes_only(name: str, module: nn.Module) -> Callable[..., Any]:
    """Make a forward that returns stand-ins for what the module would have computed.

    Where an operation has no meta form, this one module is run on zeros: memory for one unit.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
        leaves, structure = flatten(_outcome(module, device, args, kwargs, module.training))
        zeros = [one_element(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        output, added = unflatten(zeros, structure)
        Sinks(args, kwargs).put(added)
        return output

    return forward


def stand_in(leaf: Leaf, writable: bool, filling: float = 0.0) -> Tensor:
    """Make a tensor of that shape and type which costs nothing, unless the glue writes into it."""
    made = one_element(leaf, leaf.device, filling)
    return made.clone(memory_format=torch.contiguous_format) if writable else made
