"""Which runs of a model's code count.

A model that is cut by its forward runs more often than its stages compute: recorded on the example, measured, on empty
tensors to learn a shape; and the code between its units runs on every stage. Layers that leave something behind for the
batch (a loss by `add_loss`, the statistics of a deferred batch norm) must do so once, so they ask here. Each thread has
its own answer, because ranks may be threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

DRY = "dry"  # only to learn something about the code
EVERYWHERE = "everywhere"  # between the units of a model, on every stage

_now = threading.local()


@contextmanager
def run_as(kind: str | None) -> Iterator[None]:
    """What runs inside is of this kind; None: it counts. Inside of a dry run, all is dry."""
    outer = run_kind()
    _now.kind = outer if outer == DRY else kind
    try:
        yield
    finally:
        _now.kind = outer


def run_kind() -> str | None:
    """`DRY`, `EVERYWHERE`, or None where what runs counts."""
    return getattr(_now, "kind", None)
