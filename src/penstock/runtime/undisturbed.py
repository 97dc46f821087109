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
from penstock.model.away import is_away
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
        entries = {number: dict(table) for number, table in tables.items()}
        before = {
            (number, name): (buffer, version_of(buffer), self._copy((number, name), buffer))
            for number, table in entries.items()
            for name, buffer in table.items()
            if buffer is not None and not buffer.is_meta and not is_away(buffer)
        }
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for number, table in tables.items():
                if isinstance(table, dict):  # a scripted module's cannot change
                    table.clear()  # of what the evaluation has put there
                    table.update(entries[number])
            self._restore(before)

    def _copy(self, key: Key, buffer: Tensor) -> Tensor | None:
        if self._still is not None and key in self._still:
            return None
        return buffer.detach().clone()

    def _restore(self, before: dict[Key, tuple[Tensor, int, Tensor | None]]) -> None:
        still, late = set(), []
        for key, (buffer, version, copy) in before.items():
            if version_of(buffer) != version and copy is None:
                late.append(key[1])
            elif copy is not None and _differs(buffer, version, copy):
                with torch.no_grad():
                    buffer.copy_(copy)
            elif buffer.numel() * buffer.element_size() > SMALL_BYTES:
                still.add(key)
        self._still = still
        if late:
            raise RunError(
                f"the evaluation wrote to {', '.join(late)}, which earlier ones did not, so that no copy was kept to "
                f"restore: the model is not what it was; write to buffers in training mode only"
            )


def _differs(buffer: Tensor, version: int, copy: Tensor) -> bool:
    """Batch norm writes past versions, so that values are compared too; a plain tensor's can be."""
    if version_of(buffer) != version:
        return True
    return type(buffer) is Tensor and not torch.equal(buffer, copy)
