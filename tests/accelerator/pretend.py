"""A pretended accelerator: torch's CPU kernels on devices of their own, with streams, events and a ledger of races.

    PRETEND_NAME=pretend (the default): a device of its own name, so that nothing may ask for "cuda"
    PRETEND_NAME=cuda:   in the empty places of CUDA in a CPU build; import this before torch
    PRETEND_DEVICES=8:   how many

`races()` has the accesses that nothing orders, `syncs()` where the host waited for the device, each with its place in
the program. What a kernel's memory is, what is ordered, and what the process group does is in the sources in `device/`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerator import build

NAME = os.environ.setdefault("PRETEND_NAME", "pretend")
TORCH_LIBRARIES = ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so")
DEPTH = 10  # frames of a place
OUTSIDE = (
    f"{os.sep}torch{os.sep}",
    str(Path(__file__).parent / "pretend.py"),
    str(Path(__file__).parent / "torch_module.py"),
)


def _load_before_torch(library: Path) -> None:
    """Take CUDA's place: torch asks once, while it is imported, whether there is CUDA."""
    if "torch" in sys.modules:
        raise RuntimeError("as `cuda`, the pretended device has to be loaded before torch is")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    for name in TORCH_LIBRARIES:
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


def _load_native(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(build.MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_library = build.built()
if NAME == "cuda":
    _load_before_torch(_library)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerator import torch_module  # noqa: E402

if NAME != "cuda":
    torch.utils.rename_privateuse1_backend(NAME)
native = _load_native(_library)


@dataclass(frozen=True)
class Finding:
    """Something that the device reported: what, and where the program was (the innermost frame first)."""

    text: str
    place: str

    def __str__(self) -> str:
        return f"{self.text}\n    at {self.place}"


_findings: dict[str, list[Finding]] = {"race": [], "sync": [], "error": [], "deadlock": []}
_lock = threading.Lock()


def _where() -> str:
    """Return the innermost frames that are neither torch's nor the device's own."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < DEPTH:
        name = frame.f_code.co_filename
        if not any(part in name for part in OUTSIDE) and not name.startswith("<"):
            found.append(f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def _observe(kind: str, text: str) -> str:
    place = _where()
    if kind != "place":
        with _lock:
            _findings[kind].append(Finding(text, place))
    return place


def races() -> list[Finding]:
    """Return the accesses that no event, wait or synchronisation orders, and reuse of memory in use."""
    return list(_findings["race"])


def syncs() -> list[Finding]:
    """Return where the host has waited for the device."""
    return list(_findings["sync"])


def errors() -> list[Finding]:
    """Return errors of kernels that ran later than they were launched."""
    return list(_findings["error"])


def deadlocks() -> list[Finding]:
    """Return the reports of communicators that cannot go on."""
    return list(_findings["deadlock"])


def clear() -> None:
    """Wait for all devices, then forget what was found and all accesses so far."""
    for each in range(native.device_count()):
        torch.accelerator.synchronize(each)
    native.forget()
    with _lock:
        for found in _findings.values():
            found.clear()


def device(index: int) -> torch.device:
    """Return the device of that number under the name in use."""
    return torch.device(NAME, index)


def defer(on: bool = True, lag: float = 0.0) -> None:
    """Let streams run behind the host; each kernel `lag` seconds behind its launch, unless somebody waits for it."""
    native.defer(on, lag)


native.observe(_observe)
counts = native.counts  # launches, accesses, synchronisations, races, blocks
places = native.places  # whether a race names the place of the earlier access too: slow
let_go = native.let_go  # of the kernels that hang


def sleep(seconds: float, device: int = -1) -> None:
    """Launch a kernel that takes so long, on the current stream of the device, by default the current one."""
    native.sleep(seconds, device)


def hang(device: int = -1) -> None:
    """Launch a kernel that does not end until it is let go; deferred only."""
    native.hang(device)


if NAME == "cuda":
    torch_module.take_the_place_of_cuda(native)
else:
    torch._register_device_module(NAME, torch_module.module_for(NAME, native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


_folder = ""  # where the processes of the world leave what they wait for


def _make_group(options: Any, _: Any) -> Any:
    """Make the backend of a process group; the first one tells all processes where to leave their state."""
    global _folder
    store, rank = options.store, options.group_rank
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if not _folder:
        if rank == 0:
            store.set("folder", tempfile.mkdtemp(prefix="pretend-waits-"))
        _folder = store.get("folder").decode()
        patience = float(os.environ.get("PRETEND_PATIENCE", "1.0"))
        native.watch_for_deadlocks(ranks[rank], _folder, patience)
    return native.make_group(store, options.group_id or "world", rank, ranks, options.timeout.total_seconds())


messages = native.messages  # how many communications were launched


def waits() -> str:
    """Return what stands in the queues of this process's communicators."""
    return str(native.state(dist.get_rank()))


dist.Backend.register_backend("pretendccl", _make_group, extended_api=True, devices=[NAME])
