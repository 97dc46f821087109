"""Devices in torch's own words, so that the rest of the package names no kind of accelerator."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import UsageError

CPU = torch.device("cpu")
# Processes of one host read the same there, and share the monotonic clock.
BOOT = Path("/proc/sys/kernel/random/boot_id")
QUEUES, FEWEST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 8  # which is what a device has by default


def accelerator() -> str | None:
    """Return the kind of accelerator that this process can use, such as "cuda"; None without any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


@cache
def has_accelerator() -> bool:
    """Return whether there is one, for what is asked often."""
    return accelerator() is not None


def device_types() -> tuple[str, ...]:
    """Return the kinds of devices that this process computes on."""
    found = accelerator()
    return ("cpu",) if found is None else ("cpu", found)


def on_accelerator(device: torch.device | None) -> bool:
    """Return whether kernels on this device run while the host goes on."""
    return device is not None and device.type not in ("cpu", "meta")


@cache
def widest(kind: str) -> torch.dtype:
    """Return the widest dtype in which devices of this kind compute; some have no float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=kind)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def indexed(device: torch.device | str) -> torch.device:
    """Return the device with its number: an accelerator without one is this thread's current device."""
    found = torch.device(device)
    if on_accelerator(found) and found == torch.device(found.type) and found.type == accelerator():
        return torch.device(found.type, torch.accelerator.current_device_index())
    return found


def mark(device: torch.device) -> torch.Event:
    """Record an event behind all that was launched on the device, which has the time when that was done."""
    event = torch.Event(device.type, enable_timing=True)
    torch.accelerator.current_stream(device).record_event(event)
    return event


@contextmanager
def as_caller(device: torch.device, streams: Iterable[torch.Stream], default: torch.device) -> Iterator[None]:
    """Let a thread compute as the one that called it would: on its streams, with its default device.

    All three belong to a thread in torch; `device` is the current one inside, which is this thread's own.
    """
    for stream in streams:
        if torch.accelerator.current_stream(stream.device) != stream:
            torch.accelerator.set_stream(stream)
    if on_accelerator(device):
        torch.accelerator.set_device_index(device)
    with nullcontext() if default == torch.get_default_device() else default:
        yield


def check_queues(device: torch.device) -> None:
    """Raise if a device has been left few queues for what is launched on its streams.

    Streams that share a queue follow each other in it: a kernel that waits for a message then holds up the one that
    sends what the other rank needs to send that message.
    """
    given = os.environ.get(QUEUES, "")
    if device.type == "cuda" and given.isdecimal() and int(given) < FEWEST_QUEUES:
        raise UsageError(
            f"{QUEUES}={given}: communicators of a pipeline would wait for each other in one queue of {device}; unset "
            f"it, or give {FEWEST_QUEUES} to 32"
        )


def identity(device: torch.device) -> str:
    """Return what processes that compute on the same device have in common, and no others, in 16 digits."""
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    visible = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.endswith("VISIBLE_DEVICES")]
    found = str(getattr(properties, "uuid", (BOOT.read_text(), visible, device.index)))
    return hashlib.blake2b(found.encode(), digest_size=8).hexdigest()


def device_memory() -> int | None:
    """Return the bytes that the smallest device of the accelerator has; None where torch cannot ask it."""
    try:
        found = [torch.accelerator.get_memory_info(index)[1] for index in range(torch.accelerator.device_count())]
        return min(found, default=None)
    except (RuntimeError, AttributeError):  # not every kind has this
        return None


def free_memory() -> float:
    """Return the bytes of this host's memory that nobody uses."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def to_device(value: Any, device: torch.device | None) -> Any:
    """Return the value with its tensors on a device; None leaves them where they are.

    The host does not wait for copies to an accelerator, whose kernels do.
    """
    if device is None:
        return value
    behind = on_accelerator(device)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=behind), value)


# One stream of this process beside the kernels of each device.
_COPYING: dict[torch.device, torch.Stream] = {}


@contextmanager
def copying(device: torch.device, reads: list[torch.Event]) -> Iterator[Callable[[Any], Any]]:
    """Yield a `to_device` whose copies run beside the kernels that are queued; after the block, the stream has them.

    Copies from pinned memory are under way while the host goes on: `reads` then has one event more, which says when
    that memory is read no longer. Others do not wait for kernels either.
    """
    if not on_accelerator(device):
        yield partial(to_device, device=device)
        return
    here, is_pinned = torch.accelerator.current_stream(device), False
    beside = _COPYING.get(device) or _COPYING.setdefault(device, torch.Stream(device=device))

    def moved(tensor: Tensor) -> Tensor:
        nonlocal is_pinned
        is_pinned = is_pinned or (tensor.is_cpu and tensor.layout is torch.strided and tensor.is_pinned())
        copy = tensor.to(device, non_blocking=True)
        if copy is not tensor:
            copy.record_stream(here)
        return copy

    with beside:
        yield partial(pytree.tree_map_only, Tensor, moved)
    if is_pinned:
        reads.append(beside.record_event())
    here.wait_stream(beside)


def backends() -> str:
    """Return the backends of a process group: gloo for the CPU, and the accelerator's own where there is one."""
    kind = accelerator()
    own = None if kind is None else torch.distributed.Backend.default_device_backend_map.get(kind)
    return "gloo" if own in (None, "gloo") else f"cpu:gloo,{kind}:{own}"


def own_backend(group: Any, kind: str) -> Any:
    """Return the backend that a process group has for the accelerator itself; None where that is gloo, for CPUs."""
    device = torch.device(kind)
    if not isinstance(group, torch.distributed.ProcessGroup) or device not in group._device_types:
        return None
    found = group._get_backend(device)
    return None if found.name() == "gloo" else found


@cache
def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that a device's operations draw from by default."""
    if not on_accelerator(device):
        return torch.default_generator
    if device.type == "mps":  # Its module has one function in the place of the tuple that the others have.
        one: torch.Generator = torch.mps._get_default_mps_generator()
        return one
    module: Any = torch.get_device_module(device)
    if not module.is_initialized():
        module.init()
    found: torch.Generator = module.default_generators[indexed(device).index]
    return found


def generators() -> list[torch.Generator]:
    """Return the generators of all the accelerator's devices."""
    kind = accelerator()
    if kind is None:
        return []
    return [generator_of(torch.device(kind, index)) for index in range(torch.accelerator.device_count())]
