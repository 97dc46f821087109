"""What a machine has: devices, backends, versions, and how its devices are connected."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

import torch
import torch.distributed as dist

import penstock
from penstock.devices import accelerator, backends

TOPOLOGIES = (("nvidia-smi", "topo", "-m"), ("rocm-smi", "--showtopo"), ("xpu-smi", "topology", "-m"))
SECONDS = 20  # A vendor's tool may take as long.


def device_type() -> str:
    """Return the kind of device that a pipeline would use here."""
    return accelerator() or "cpu"


def device_count(kind: str) -> int:
    """Return how many ranks this machine has devices for; a CPU stands for as many as it has cores, two at least."""
    return max(2, len(os.sched_getaffinity(0))) if kind == "cpu" else int(torch.accelerator.device_count())


def describe_machine() -> dict[str, Any]:
    """Return what is known about this machine before anything has run."""
    kind = device_type()
    module = getattr(torch, kind, None)
    names = ["CPU core"] * device_count(kind)
    if kind != "cpu":
        describe = getattr(module, "get_device_name", lambda index: f"{kind}:{index}")
        names = [str(describe(index)) for index in range(device_count(kind))]
    return {
        "device": names[0],
        "devices": names,
        "kind": kind,
        "backend": backends(),
        "penstock": penstock.__version__,
        "torch": torch.__version__,
        "runtime": torch.version.cuda or torch.version.hip or torch.version.xpu or "",
        "nccl": _nccl_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "topology": _topology() if kind != "cpu" else "",
    }


def _nccl_version() -> str:
    if not dist.is_nccl_available() or torch.version.cuda is None:
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _topology() -> str:
    """Return what the vendor's tool prints about the links between devices; nothing where there is no such tool."""
    for command in TOPOLOGIES:
        if shutil.which(command[0]) is not None:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            except subprocess.TimeoutExpired:
                return f"{' '.join(command)} gave no answer within {SECONDS} s"
            return done.stdout
    return ""
