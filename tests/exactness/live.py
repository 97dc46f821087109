"""How many bytes a rank holds: storages counted, not the process's memory.

A mode that sees every operation notes the storages that it makes, weakly; a storage counts as long as anything keeps
it: a graph in C++, a record, a gradient that waits for W. It is on while a rank computes, by way of handlers, so what
a rank makes is that rank's. What a stage has made for another is a message, and no activation, until it is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op, Schedule


class Ledger:
    """The storages of one rank, and what was alive after each of its actions."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.history: list[tuple[Action, int]] = []

    def add(self, value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._known.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def remove(self, value: Any) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                self._known.pop(leaf.untyped_storage()._cdata, None)

    def alive(self) -> int:
        for key in [key for key, (ref, _) in self._known.items() if ref.expired()]:
            del self._known[key]
        return sum(size for _, size in self._known.values())

    @property
    def peak(self) -> int:
        return max(size for _, size in self.history)


class _Watch(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._ledger.add(made)
        return made


@dataclass
class Live:
    """Watches all local ranks of a pipeline from `watch` on. The batch is the user's own and does not count."""

    pipe: penstock.Pipeline
    batch: tuple[Tensor, ...]
    ledgers: dict[int, Ledger] = field(default_factory=dict)

    def watch(self) -> Live:
        self.ledgers = {rank: Ledger() for rank in self.pipe.deployment.ranks.executors}
        for op in Op:
            self.pipe.register(op, self._handle)
        return self

    def _handle(self, action: Action, context: Context) -> None:
        ledger, executor = self.ledgers[context.rank], self.pipe.deployment.ranks.executors[context.rank]
        if action.op.is_transfer:
            context.run(action)
            return
        context.fetch(action)
        arrived = list(executor.mailbox.fetched.values())
        ledger.add(arrived)
        del arrived
        with _Watch(ledger):
            context.run(action)
        waiting = [end.ready for end in executor.mailbox.ends.outgoing.values()]
        ledger.remove((self.batch, waiting, executor.mailbox._values))
        for parameter in self.pipe.parameters():
            ledger.remove((parameter.detach(), parameter.grad))
        ledger.history.append((action, ledger.alive()))


def allowed(schedule: Schedule, rank: int, bytes_of_stage: Sequence[int]) -> int:
    """The schedule's own peak of a rank: what it holds from F to B or W, at the most at once."""
    held = most = 0
    for action in schedule.rows[rank]:
        for part in () if action is None else action.parts():
            if part.op is Op.F:
                held += bytes_of_stage[part.stage]
                most = max(most, held)
            elif part.op in (Op.B, Op.W):
                held -= bytes_of_stage[part.stage]
    return most


def bytes_of(stage: Callable[[Tensor], Tensor], uncounted: Iterable[Tensor], x: Tensor) -> int:
    """What one microbatch of a stage holds between its forward and its backward: its input, and what autograd saved."""
    ledger = Ledger()
    with _Watch(ledger):
        x = x.clone().requires_grad_()
        graph = stage(x).grad_fn
    for tensor in uncounted:
        ledger.remove(tensor.detach())
    assert graph is not None
    return ledger.alive()
