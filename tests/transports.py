"""The transports by name, for tests that must hold on each of them.

The names come from the table by which a pipeline chooses, so all of these tests run on a new transport too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from penstock.parallel.group.world import ON_PROCESSES as CLASSES
from penstock.runtime.transport import ThreadTransport

ON_PROCESSES = list(CLASSES)  # "shared" and "distributed"
TRANSPORTS = ["threads", *ON_PROCESSES]
KINDS = ["threads", "threads-0", *ON_PROCESSES]  # "threads-0": nothing is buffered


@contextmanager
def buffering(capacity: int | None) -> Iterator[None]:
    """Pipelines made inside buffer so many messages on a link between threads; any number where it is None."""
    with patch.object(ThreadTransport, "group", partial(ThreadTransport.group, capacity=capacity)):
        yield
