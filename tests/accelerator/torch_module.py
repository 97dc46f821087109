"""`torch.pretend` and, in the other mode, what takes the place of `torch.cuda`, whose functions a CPU build lacks."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

GIGABYTE = 1 << 30


def module_for(name: str, native: Any) -> types.ModuleType:
    """Return what `torch.get_device_module(name)` has: the functions of every device module that programs use."""
    module = types.ModuleType(name)

    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return native.current_device() if device < 0 else device
        index = None if device is None else torch.device(device).index
        return native.current_device() if index is None else index

    def exchange_device(device: int) -> int:
        before = native.current_device()
        if device >= 0:
            native.set_device(device)
        return int(before)

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = native.current_device()
        native.set_device(index_of(device))
        try:
            yield
        finally:
            native.set_device(before)

    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before_device, before = native.current_device(), torch.accelerator.current_stream(stream.device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            native.set_device(before_device)

    def default_generators() -> tuple[torch.Generator, ...]:
        return tuple(native.default_generator(each) for each in range(native.device_count()))

    def manual_seed_all(seed: int) -> None:
        for each in default_generators():
            each.manual_seed(seed)

    def set_rng_state_all(states: Any) -> None:
        for each, state in zip(default_generators(), states, strict=True):
            each.set_state(state)

    def memory_stats(device: Any = None) -> dict[str, int]:
        index = index_of(device)
        both = {"current": native.bytes(index), "peak": native.peak(index)}
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        return {f"{kind}.all.{when}": value for kind in kinds for when, value in both.items()}

    functions = {
        "Stream": torch.Stream,
        "Event": torch.Event,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # torch.utils.checkpoint asks it whether there are generators to put back
        "is_bf16_supported": lambda including_emulation=True: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "device": device,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(index_of(device)),
        "stream": stream,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "default_stream": lambda device=None: (
            torch.Stream(
                stream_id=0, device_index=index_of(device), device_type=int(torch._C._autograd.DeviceType.CUDA)
            )
            if name == "cuda"
            else torch.Stream(
                stream_id=0, device_index=index_of(device), device_type=int(torch._C._autograd.DeviceType.PrivateUse1)
            )
        ),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "manual_seed": lambda seed: native.default_generator(-1).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: native.default_generator(-1).initial_seed(),
        "get_rng_state": lambda device=None: native.default_generator(index_of(device)).get_state(),
        "set_rng_state": lambda state, device=None: native.default_generator(index_of(device)).set_state(state),
        "get_rng_state_all": lambda: [each.get_state() for each in default_generators()],
        "set_rng_state_all": set_rng_state_all,
        "memory_allocated": lambda device=None: native.bytes(index_of(device)),
        "max_memory_allocated": lambda device=None: native.peak(index_of(device)),
        "memory_reserved": lambda device=None: native.bytes(index_of(device)),
        "max_memory_reserved": lambda device=None: native.peak(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index_of(device)),
        "memory_stats": memory_stats,
        "mem_get_info": lambda device=None: (8 * GIGABYTE - native.bytes(index_of(device)), 8 * GIGABYTE),
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: "pretended",
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="pretended", total_memory=8 * GIGABYTE, major=8, minor=0, multi_processor_count=1
        ),
        "default_generators": default_generators(),
    }
    for each, value in functions.items():
        setattr(module, each, value)
    return module


class _CudaStream(torch.Stream):
    """torch.cuda.Stream, whose device may be left out or be a number."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Any:
        if "stream_id" in named:
            return super().__new__(cls, **named)
        where = torch.cuda.current_device() if device is None else device
        where = torch.device("cuda", where) if isinstance(where, int) else torch.device(where)
        return super().__new__(cls, device=where, priority=priority)

    cuda_stream = property(lambda self: self.stream_id)


class _CudaEvent(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> Any:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)


def take_the_place_of_cuda(native: Any) -> None:
    """Put the device's functions where torch's own for CUDA are, which end in parts that a CPU build lacks."""
    module = module_for("cuda", native)
    cuda = torch.cuda
    for name, value in vars(module).items():
        if not name.startswith("__") and name not in ("device", "Stream", "Event"):
            setattr(cuda, name, value)
            if hasattr(cuda.random, name):
                setattr(cuda.random, name, value)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "memory_stats", "mem_get_info"):
        setattr(cuda.memory, name, getattr(module, name))
    cuda.Stream, cuda.Event = _CudaStream, _CudaEvent  # type: ignore[misc]
    cuda._is_compiled = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    torch._C._cuda_getDeviceCount = native.device_count
    torch._C._cuda_getCurrentRawStream = lambda index: torch.accelerator.current_stream(index).stream_id
    torch._C.__dict__["_has_cuda"] = True
    _resize_storages(native)
    torch.serialization.register_package(5, _location_of, _storage_at)  # before torch's own for CUDA


def _location_of(storage: Any) -> str | None:
    return str(storage.device) if storage.device.type == "cuda" else None


def _storage_at(storage: Any, location: str) -> Any:
    """Return a loaded storage on the device, by a tensor: a CPU build makes no storage there."""
    if not location.startswith("cuda"):
        return None
    loaded = torch.empty(0, dtype=torch.uint8).set_(storage)
    return loaded.to(location).untyped_storage()


def _resize_storages(native: Any) -> None:
    """Let storages on the device be resized, which FSDP does and a CPU build refuses."""
    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        native.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
