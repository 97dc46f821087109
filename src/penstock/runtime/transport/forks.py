"""What a process that user code forks off (a worker of a DataLoader) must not do to the rank that it came from.

It has copies of all that its parent had open. A connection that it kept would still be open when the rank dies, and
no peer would see that death; so it closes them, without a word. And the end of its copy of a received tensor is not
the end of the tensor: a block is given back only by the process that received it (`EPOCH`). Of a backend of gloo it
has no threads, and the end of its copy, which waits for these, would abort it; so that copy has no end.
"""

from __future__ import annotations

import ctypes
import os
import socket
import weakref
from typing import Any

EPOCH = [0]  # how many forks lie between this process and the one that first loaded this
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_forks(connection: socket.socket) -> socket.socket:
    """Return the same socket, which only this process keeps open."""
    _open.add(connection)
    return connection


def keep_in_forks(backend: Any) -> Any:
    """Return the same backend, which ends in this process only."""
    _kept.add(backend)
    return backend


def _in_child() -> None:
    EPOCH[0] += 1
    for connection in list(_open):
        connection.close()
    _open.clear()
    for backend in list(_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # a list of them would end with the interpreter


os.register_at_fork(after_in_child=_in_child)
