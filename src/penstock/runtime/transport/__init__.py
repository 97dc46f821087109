"""How values move between ranks: one seam (`base`), and a module for each way across it."""

from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.threads import ThreadTransport

__all__ = ["Channel", "ThreadTransport", "Transport"]
