"""What this rank's stages need around each computation, where parameters are sharded or tensors are spread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.parallel.sharded import Sharder
from penstock.parallel.tensor import SpreadValues

__all__ = ["ParallelHooks"]


class ParallelHooks:
    """`StageHooks` of the engine, for sharded parameters, for spread tensors, or for both."""

    def __init__(self, sharder: Sharder | None, values: SpreadValues | None) -> None:
        self._sharder = sharder
        self._values = values

    def before(self, stage: int) -> None:
        if self._sharder is not None:
            self._sharder.before(stage)

    def after(self, stage: int) -> None:
        if self._sharder is not None:
            self._sharder.after(stage)

    def pack(self, values: Mapping[int, Any]) -> dict[int, Any]:
        if self._values is None:
            return dict(values)
        return {stage: self._values.pack(value) for stage, value in values.items()}

    def unpack(self, values: Mapping[int, Any]) -> dict[int, Any]:
        if self._values is None:
            return dict(values)
        return {stage: self._values.unpack(value) for stage, value in values.items()}

    def full(self, value: Any) -> Any:
        return value if self._values is None else self._values.full(value)
