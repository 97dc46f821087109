"""What was found out about kinds of microbatches, of which there may be any number.

Batches whose sizes change at every step are of a new kind at every step. What was asked for last is asked for again
soonest, so only that is remembered; the rest is found out anew if it comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

KINDS = 256  # Kinds of microbatches, by their shapes and plain values.

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Values by key: those of the `KINDS` keys that were asked for last. Ranks that are threads may share it."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}  # the one asked for longest ago comes first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> Value | None:
        """Return None if it is not known, or no longer."""
        with self._lock:
            if key not in self._values:
                return None
            value = self._values[key] = self._values.pop(key)
            return value

    def put(self, key: Hashable, value: Value) -> Value:
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            if len(self._values) > KINDS:
                del self._values[next(iter(self._values))]
        return value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
