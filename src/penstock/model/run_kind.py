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

DRY = "dry"  # It only serves to learn something about the code.
EVERYWHERE = "everywhere"  # Between the units of a model, on every stage.

_now = threading.local()


@contextmanager
def run_as(kind: str | None) -> Iterator[None]:
    """Mark what runs inside as of this kind; None: it counts. Inside of a dry run, all is dry."""
    outer = run_kind()
    _now.kind = outer if outer == DRY else kind
    try:
        yield
    finally:
        _now.kind = outer


def run_kind() -> str | None:
    """Return `DRY`, `EVERYWHERE`, or None where what runs counts."""
    return getattr(_now, "kind", None)
