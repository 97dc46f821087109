"""What a process that user code forks off (a worker of a DataLoader) must not do to the rank that it came from.

It has copies of all that its parent had open. A connection that it kept would still be open when the rank dies, and
no peer would see that death; so it closes them, without a word. And the end of its copy of a received tensor is not
the end of the tensor: a block is given back only by the process that received it (`EPOCH`).
"""

from __future__ import annotations

import os
import socket
import weakref

EPOCH = [0]  # how many forks lie between this process and the one that first loaded this
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_forks(connection: socket.socket) -> socket.socket:
    """The same socket, which only this process keeps open."""
    _open.add(connection)
    return connection


def _in_child() -> None:
    EPOCH[0] += 1
    for connection in list(_open):
        connection.close()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)
