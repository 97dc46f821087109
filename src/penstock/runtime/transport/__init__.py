"""How values move between ranks: one seam (`base`), and a module for each way across it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.runtime.transport.base import Channel, Transport
from penstock.runtime.transport.threads import ThreadTransport

if TYPE_CHECKING:
    from penstock.runtime.transport.distributed import DistributedTransport as DistributedTransport
    from penstock.runtime.transport.shared import SharedMemoryTransport as SharedMemoryTransport

__all__ = ["Channel", "DistributedTransport", "SharedMemoryTransport", "ThreadTransport", "Transport"]

_HOMES = {"DistributedTransport": "distributed", "SharedMemoryTransport": "shared"}  # loaded where processes are


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
