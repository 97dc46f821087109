"""Mixed precision, entered around each forward: torch's autocast, without what it does for a whole program.

`torch.autocast` around a step would hold in the backward too, and for one thread only; here each forward enters it by
itself, and so does each forward that runs again for recompute. Its cache of cast weights needs care. It is one for the
whole process, and whoever leaves an outermost autocast on any thread empties it: two uses of a weight in one forward
would share a cast in one run and not in the next, and gradients would differ in their last bits. So the state is set
without the nesting that ends in emptying, and the cache is emptied where no rank computes: before a step, since an
optimizer has changed the weights, and after it. A weight is cast once per step, not once per microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.devices import device_types
from penstock.errors import UsageError

NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
Modes = tuple[tuple[str, torch.dtype | None], ...]  # kind of device, and the dtype of its autocast; None: off


def precision_of(option: Any) -> torch.dtype | None:
    """Resolve `precision=`: a dtype, float32 for autocast off, None for whatever the caller has."""
    if option is None:
        return None
    dtype = NAMES.get(option.lower()) if isinstance(option, str) else option
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UsageError(f"precision={option!r}: choose 'bf16', 'fp16' or 'fp32', or one of torch's dtypes for them")
    return dtype


class Precision:
    """What a rank's forwards enter: `with precision():`."""

    def __init__(self, modes: Modes, cached: bool = True) -> None:
        self.modes = modes
        self._cached = cached

    @classmethod
    def on(cls, dtype: torch.dtype, kinds: Iterable[str]) -> Precision:
        """Make one dtype for all that computes on these kinds of devices."""
        return cls(tuple((kind, None if dtype is torch.float32 else dtype) for kind in sorted(set(kinds))))

    def __call__(self) -> AbstractContextManager[None]:
        return _Entered(self.modes, self._cached)

    def off(self) -> AbstractContextManager[None]:
        """Open a context without autocast, for everything but forwards: backwards and transfers."""
        return _Entered(tuple((kind, None) for kind, _ in self.modes), self._cached)


def caller_precision() -> Precision | None:
    """Return the autocast that this thread is under, if it is under one."""
    modes = tuple((kind, torch.get_autocast_dtype(kind)) for kind in device_types() if torch.is_autocast_enabled(kind))
    return Precision(modes, torch.is_autocast_cache_enabled()) if modes else None


empty_cache: Callable[[], None] = torch.clear_autocast_cache


class _Entered(AbstractContextManager[None]):
    def __init__(self, modes: Modes, cached: bool) -> None:
        self._modes = modes
        self._cached = cached

    def __enter__(self) -> None:
        self._cached_before = torch.is_autocast_cache_enabled()
        self._before = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind, _ in self._modes
        ]
        torch.autocast_increment_nesting()  # An autocast inside a module must not empty the cache as it ends.
        torch.set_autocast_cache_enabled(self._cached)
        for kind, dtype in self._modes:
            torch.set_autocast_enabled(kind, dtype is not None)
            if dtype is not None:
                torch.set_autocast_dtype(kind, dtype)

    def __exit__(self, *_: object) -> None:
        for kind, enabled, dtype in self._before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cached_before)
        torch.autocast_decrement_nesting()
