"""Handing a value to another thread without a copy.

The receiver must not see the sender's graph: it gets detached aliases, made by the *sender* so
that a message under way does not keep the graph alive. An alias shares its memory and its
version counter with the original; a stage that changes its input in place is therefore caught
by autograd at the sender and not silently wrong.

On CUDA an alias alone is not enough: the kernels that write it may still be queued on the
sender's stream, and the allocator may hand its memory out again once the sender has let go.
The sender therefore records an event, and the receiver makes its own stream wait for it and
tells the allocator that its stream uses the memory. (There is no GPU where this was written:
that part follows the documentation of torch.cuda and has not been run.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Ready", "arrive", "share"]

Ready = list[tuple[torch.device, "torch.cuda.Event"]]


def alias(leaf: Any) -> Any:
    """The same memory as a leaf of another graph; what is not a tensor is its own alias."""
    if isinstance(leaf, Tensor):
        detached = leaf.detach()
        if leaf.requires_grad:
            detached.requires_grad_()
        return detached
    return leaf


def share(value: Any) -> tuple[Any, Ready | None]:
    """A copy of the containers with aliases of the tensors, and the events to wait for (CUDA only)."""
    kind = type(value)
    if kind is Tensor:
        shared: Any = alias(value)
        tensors = [value]
    elif (kind is tuple or kind is list) and all(leaf is None or type(leaf) is Tensor for leaf in value):
        shared = kind([alias(leaf) for leaf in value])
        tensors = [leaf for leaf in value if leaf is not None]
    else:
        leaves, spec = pytree.tree_flatten(value)
        shared = pytree.tree_unflatten([alias(leaf) for leaf in leaves], spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.is_cuda:
            return shared, _record(tensors)
    return shared, None


def _record(tensors: list[Tensor]) -> Ready:
    """One event for each device that holds a part of the value (not run here: no GPU)."""
    ready: Ready = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        with torch.cuda.device(device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
        ready.append((device, event))
    return ready


def arrive(value: Any, ready: Ready | None, device: torch.device | None) -> Any:
    """Make a shared value usable in this thread, and move it to `device` if one is given."""
    if ready is None and device is None:
        return value
    for source, event in ready or ():
        torch.cuda.current_stream(source).wait_event(event)

    def settle(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if device is None or tensor.device == device:
            return tensor
        # the copy runs on this thread's streams of both devices, which now follow the sender's
        moved = tensor.detach().to(device, non_blocking=tensor.is_cuda)
        return moved.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, settle, value)
