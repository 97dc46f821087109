"""Drop-in names for people who come from torchgpipe: change `torchgpipe` to `penstock.compat.torchgpipe` in imports."""

from __future__ import annotations

from penstock.compat.torchgpipe.gpipe import GPipe
from penstock.runtime.state.phase import is_checkpointing, is_recomputing

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]
