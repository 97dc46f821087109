"""How values move between ranks: one seam (`base`, `channel`); across it, `threads`, `distributed/`, `shared_memory/`.

handover         a value as it passes between threads, and layout/ the memory that it takes between processes
interrupts       Ctrl-C waits for messages;  forks: what a forked child may not touch;  own_socket
failure/         the watch beside each rank: a rank that died, stalled or raised is named by all
"""

from penstock.runtime.transport.base import Transport
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.threads import ThreadTransport

__all__ = ["Channel", "ThreadTransport", "Transport"]
