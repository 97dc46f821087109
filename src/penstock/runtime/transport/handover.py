"""Handing a value to another thread without a copy.

The receiver must not see the sender's graph: it gets detached aliases, made by the *sender* so that a message under way
does not keep the graph alive. An alias shares its memory and its version counter with the original; so a write to it
while the message is under way, as by a sender that uses its output's memory anew, is seen and not silently wrong.

On an accelerator an alias alone is not enough: the kernels that write it may still be queued on the sender's stream,
and the allocator may hand its memory out again once the sender has let go. So the sender records an event; the
receiver makes its own stream wait for it and tells the allocator that its stream uses the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.devices import on_accelerator, to_device
from penstock.errors import RunError

Events = list[tuple[torch.device, torch.Event]]


class Rewritten(RunError):
    """A value was written to between its sending and its arrival; says whose it was, where that is known."""

    def __init__(self, stage: int | None = None, microbatch: int | None = None) -> None:
        if stage is None:
            super().__init__("a value was written to after it was handed over; return a copy of it")
            return
        super().__init__(
            f"what stage {stage} handed over for microbatch {microbatch} was written to in place before it was read: "
            "the stage that made it, or another that reads it too, uses its memory again; return a copy (.clone()) "
            "of it"
        )


class Several(NamedTuple):
    """What to look at on arrival: the tensors, the versions they had when they left, and the events to wait for."""

    tensors: list[Tensor]
    versions: list[int]
    events: Events | None


Ready = int | Several  # a number: the version of the one tensor that there is


def alias(leaf: Any) -> Any:
    """Return the same memory as a leaf of another graph; what is not a tensor is its own alias."""
    if isinstance(leaf, Tensor):
        detached = leaf.detach()
        return detached.requires_grad_() if leaf.requires_grad else detached
    return leaf


def share(value: Any) -> tuple[Any, Ready]:
    """Return a copy of the containers with aliases of the tensors, and what to look at when they arrive."""
    kind = type(value)
    if kind is Tensor:
        shared: Any = alias(value)
        if shared.is_cpu and not shared.is_inference():
            return shared, shared._version
        tensors = [shared]
    elif (kind is tuple or kind is list) and all(leaf is None or type(leaf) is Tensor for leaf in value):
        shared = kind([alias(leaf) for leaf in value])
        tensors = [leaf for leaf in shared if leaf is not None]
    else:
        leaves, spec = pytree.tree_flatten(value)
        aliases = [alias(leaf) for leaf in leaves]
        shared = pytree.tree_unflatten(aliases, spec)
        tensors = [leaf for leaf in aliases if isinstance(leaf, Tensor)]
    versions, events = [], None
    for tensor in tensors:
        versions.append(-1 if tensor.is_inference() else tensor._version)
        if on_accelerator(tensor.device) and events is None:
            devices = {each.device for each in tensors if on_accelerator(each.device)}
            events = [(device, torch.accelerator.current_stream(device).record_event()) for device in devices]
    return shared, Several(tensors, versions, events)


def arrive(value: Any, ready: Ready | None, device: torch.device | None, *, from_cpu: bool = True) -> Any:
    """Make a shared value usable in this thread, and move it to `device` if one is given.

    What a rank on an accelerator (not `from_cpu`) has on the CPU is meant to be there, as lengths of sequences are.
    """
    events = None
    if type(ready) is int:
        if value._version != ready:
            raise Rewritten
    elif isinstance(ready, Several):
        events = ready.events
        for tensor, version in zip(ready.tensors, ready.versions, strict=True):
            if version >= 0 and tensor._version != version:
                raise Rewritten
    if events is None and device is None:
        return value
    for source, event in events or ():
        torch.accelerator.current_stream(source).wait_event(event)

    def settle(tensor: Tensor) -> Tensor:
        if on_accelerator(tensor.device):
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        if device is None or tensor.device == device or (tensor.is_cpu and not from_cpu):
            return tensor
        # the copy runs on this thread's streams of both devices, which now follow the sender's
        moved: Tensor = to_device(tensor.detach(), device)
        return moved.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, settle, value)
