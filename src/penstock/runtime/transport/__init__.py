"""How values move between ranks: one seam (`base`), and a module for each way across it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.threads import ThreadTransport

if TYPE_CHECKING:
    from penstock.runtime.transport.distributed.transport import DistributedTransport as DistributedTransport
    from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport as SharedMemoryTransport

__all__ = ["Channel", "DistributedTransport", "SharedMemoryTransport", "ThreadTransport", "Transport"]

# loaded only where ranks are processes
_HOMES = {"DistributedTransport": "distributed.transport", "SharedMemoryTransport": "shared_memory.transport"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
