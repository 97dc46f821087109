"""What the thread that runs a layer is doing with it, for layers that need to know.

A layer's forward runs once for each microbatch, and with recompute twice; one that counts, draws its own numbers or
keeps statistics has to tell these apart. Each thread has its own answer, because ranks may be threads. A checkpoint
inside a layer runs again on a thread of autograd's, if it is on an accelerator: what is stashed in torch's own state of
a thread goes along from the thread that called the backward.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

IN_TLS = "penstock.phase"  # the name by which a backward finds it on threads of autograd's


@dataclass(slots=True)
class Phase:
    """One compute: entered by a stage around it, read by the layers in it."""

    kind: str  # "forward", "checkpointing", "recomputing" or "backward"
    microbatch: int
    statistics: Any = None  # of the stage's batch norms, where they are collected
    calls: dict[int, int] = field(default_factory=dict)  # how often each layer that asked was called so far
    extra: list[tuple[str, Tensor]] = field(default_factory=list)  # what `add_loss` was given, by name
    _outer: Phase | None = None

    def __enter__(self) -> Phase:
        self._outer, NOW.own = NOW.own, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        NOW.own = self._outer


class _Now(threading.local):
    """The compute that each thread is in, if it is in one."""

    own: Phase | None = None  # entered on this thread

    @property
    def phase(self) -> Phase | None:
        """The compute that this thread is in, or the one whose backward runs on this thread of autograd's."""
        if self.own is not None or not torch._C._is_key_in_tls(IN_TLS):
            return self.own
        found: Phase | None = torch._C._get_obj_in_tls(IN_TLS)
        return found


NOW = _Now()


def is_checkpointing() -> bool:
    """In a layer's forward: whether its activations are dropped, because it will run again for the backward."""
    phase = NOW.phase
    return phase is not None and phase.kind == "checkpointing"


def is_recomputing() -> bool:
    """In a layer's forward: whether this is the second run of a microbatch, for its backward."""
    phase = NOW.phase
    return phase is not None and phase.kind == "recomputing"


def current_microbatch() -> int | None:
    """In a layer's forward: the number of the microbatch, or `None` outside a pipeline.

    A layer that counts batches rather than microbatches counts where this is `None` or 0 and `is_recomputing()` is
    false.
    """
    phase = NOW.phase
    return None if phase is None else phase.microbatch
