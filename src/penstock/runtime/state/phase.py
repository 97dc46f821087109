"""What the thread that runs a layer is doing with it, for layers that need to know.

A layer's forward runs once for each microbatch, and with recompute twice; one that counts, draws its own numbers or
keeps statistics has to tell these apart. Each thread has its own answer, because ranks may be threads.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from torch import Tensor

__all__ = ["Phase", "current_microbatch", "here", "is_checkpointing", "is_recomputing"]

_now = threading.local()


class Phase:
    """One compute: entered by a stage around it, read by the layers in it."""

    __slots__ = ("_outer", "calls", "extra", "kind", "microbatch", "statistics")

    def __init__(self, kind: str, microbatch: int, statistics: Any = None) -> None:
        self.kind = kind  # "forward", "checkpointing", "recomputing" or "backward"
        self.microbatch = microbatch
        self.statistics = statistics  # of the stage's batch norms, where they are collected
        self.calls: dict[int, int] = {}  # how often each layer that asked was called so far
        self.extra: list[tuple[str, Tensor]] = []  # what `add_loss` was given, by name

    def __enter__(self) -> Phase:
        self._outer = getattr(_now, "phase", None)
        _now.phase = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _now.phase = self._outer


def here() -> Phase | None:
    """The compute that this thread is in, if it is in one."""
    return getattr(_now, "phase", None)


def is_checkpointing() -> bool:
    """In a layer's forward: whether what it saves is thrown away, because it will run again for the backward."""
    phase = here()
    return phase is not None and phase.kind == "checkpointing"


def is_recomputing() -> bool:
    """In a layer's forward: whether this is the second run of a microbatch that was checkpointed."""
    phase = here()
    return phase is not None and phase.kind == "recomputing"


def current_microbatch() -> int | None:
    """In a layer's forward: the number of the microbatch; None outside of a pipeline.

    A layer that counts batches, not microbatches, counts where it is None or 0 and `is_recomputing()` is false.
    """
    phase = here()
    return None if phase is None else phase.microbatch
