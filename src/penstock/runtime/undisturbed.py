"""An evaluation leaves a model as it was: modes, and buffers, also of layers that write to them in eval mode.

Small buffers are copied before each evaluation. Large ones mostly are tables that never change: they are copied before
the first evaluation, which shows whether they do, and from then on only if they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime.buffers import SMALL_BYTES, Key, version_of

__all__ = ["Undisturbed"]


class Undisturbed:
    """One for each pipeline."""

    def __init__(self) -> None:
        self._still: set[Key] | None = None  # large buffers that the first evaluation left alone; None: it is to come

    @contextmanager
    def __call__(self, stages: Iterable[nn.Module]) -> Iterator[None]:
        modules = [module for stage in stages for module in stage.modules()]
        modes = [(module, module.training) for module in modules]
        tables = {id(module._buffers): module._buffers for module in modules}
        empty = [(table, name) for table in tables.values() for name, buffer in table.items() if buffer is None]
        before = {
            (number, name): (buffer, version_of(buffer), self._copy((number, name), buffer))
            for number, table in tables.items()
            for name, buffer in table.items()
            if buffer is not None
        }
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            self._restore(tables, before)
            for table, name in empty:
                table[name] = None

    def _copy(self, key: Key, buffer: Tensor) -> Tensor | None:
        if self._still is not None and key in self._still:
            return None
        return buffer.detach().clone()

    def _restore(
        self, tables: dict[int, dict[str, Tensor | None]], before: dict[Key, tuple[Tensor, int, Tensor | None]]
    ) -> None:
        still, late = set(), []
        for number, table in tables.items():
            for name in [name for name, value in table.items() if value is not None and (number, name) not in before]:
                del table[name]  # made by the evaluation
        for key, (buffer, version, copy) in before.items():
            tables[key[0]][key[1]] = buffer
            moved = version_of(buffer) != version
            if copy is None and moved:
                late.append(key[1])
                continue
            if copy is not None and (moved or not torch.equal(buffer, copy)):  # batch norm writes past versions
                with torch.no_grad():
                    buffer.copy_(copy)
                continue
            if buffer.numel() * buffer.element_size() > SMALL_BYTES:
                still.add(key)
        self._still = still
        if late:
            raise RunError(
                f"the evaluation wrote to {', '.join(late)}, which earlier ones did not, so that no copy was kept to "
                f"restore: the model is not what it was; write to buffers in training mode only"
            )
