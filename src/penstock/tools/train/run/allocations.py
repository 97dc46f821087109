"""Counts what this thread allocates and frees of the memory of tensors, exactly.

torch's own profiler sees every block that its allocator gives out or takes back, with address and size, whether
a tensor that a user sees is made of it or a kernel needs it for a moment. So a peak is a sum over a list, and not what
a clock happened to see. The numbers that are computed are not touched.

What other ranks send lies in memory that is shared with them, and of which that allocator knows nothing; handlers of
the computes see how much of it there is (`Arrivals`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.autograd import profiler
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from penstock.schedule import Action, Op

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline
    from penstock.runtime.engine.handlers import Context

QUIET = "99"  # a level of messages above all that the profiler has
LABEL = "penstock "  # The executor labels actions by it, while somebody profiles.
COMPUTES = (Op.F, Op.B, Op.I, Op.W)
STAYS = sys.maxsize  # later than any moment


class BlockChange(NamedTuple):
    """A block of memory that was given out, or taken back where `nbytes` is negative."""

    when: int
    nbytes: int
    address: int


class Allocations:
    """What happens to the memory of tensors inside the `with` block, in the order in which it happens.

    `actions` has when the computes of a pipeline's program began and ended, the last time that each ran.
    """

    def __init__(self) -> None:
        self.changes: list[BlockChange] = []
        self.actions: dict[Action, tuple[int, int]] = {}
        # The profiler would report on the terminal that it begins and ends.
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        self._profile: Any = profiler.profile(profile_memory=True)

    @staticmethod
    def can_count() -> bool:
        """Return whether nobody else is profiling: there is one profiler in a process."""
        return not profiler._is_profiler_enabled

    def __enter__(self) -> Allocations:
        self._profile.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._profile.__exit__(None, None, None)
        for event in _all(self._profile.kineto_results.experimental_event_tree()):
            if hasattr(event.extra_fields, "alloc_size"):
                block = event.extra_fields
                self.changes.append(BlockChange(event.start_time_ns, block.alloc_size, block.ptr))
            elif event.name.startswith(LABEL):
                action = Action.parse(event.name.removeprefix(LABEL))
                times = event.start_time_ns, event.end_time_ns
                if action.op in COMPUTES:
                    self.actions[action] = max(times, self.actions.get(action, times))
        self.changes = list(_own(sorted(self.changes, key=lambda change: change.when)))

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """Return how much more is held at the end of a span of time than at its start, and how much more at most."""
        inside = [change.nbytes for change in self.changes if begin <= change.when < end]
        return sum(inside), max(accumulate(inside, initial=0))

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield all blocks: (when it came, when it went, bytes). What stays, as gradients do, goes at `STAYS`."""
        there: dict[int, BlockChange] = {}
        for change in self.changes:
            if change.nbytes > 0:
                there[change.address] = change
            elif (began := there.pop(change.address, None)) is not None:
                yield began.when, change.when, began.nbytes
        yield from ((each.when, STAYS, each.nbytes) for each in there.values())


def _own(changes: Iterable[BlockChange]) -> Iterator[BlockChange]:
    """Leave out what was given out earlier and is taken back now, such as garbage that Python happens to collect."""
    there: set[int] = set()
    for change in changes:
        if change.nbytes > 0:
            there.add(change.address)
            yield change
        elif change.address in there:
            there.remove(change.address)
            yield change


def most_at_once(spans: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes at any moment, of (when they come, when they go, bytes)."""
    changes = sorted(change for begin, end, size in spans for change in ((begin, size), (end, -size)))
    return max(accumulate((size for _, size in changes), initial=0))


class Arrivals:
    """How much the computes of a step find in messages, seen inside the `with` block."""

    def __init__(self, pipe: Pipeline) -> None:
        self.sizes: dict[tuple[Action, int], int] = {}  # Indexed by the compute and the stage that has sent it.
        self._pipe = pipe
        (executor,) = pipe.deployment.ranks.executors.values()
        self._fetched = executor.mailbox.fetched

    def __enter__(self) -> Arrivals:
        for op in COMPUTES:
            self._pipe.register(op, self._compute)
        return self

    def __exit__(self, *_: object) -> None:
        for op in COMPUTES:
            self._pipe.register(op, None)

    def _compute(self, action: Action, context: Context) -> None:
        context.fetch(action)
        found = self._fetched.get(("F" if action.op is Op.F else "B", action.stage, action.microbatch), {})
        for maker, value in found.items():
            self.sizes[action, maker] = bytes_of(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
        del found  # It must not be held while it is computed on.
        context.compute(action)

    def spans(self, times: Mapping[Action, tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield what came from other ranks: (when a compute took it, when it was given up, bytes).

        An input is kept until the last backward of its microbatch, a gradient while one runs.
        """
        own = {action.stage for action in times}
        for (action, maker), size in self.sizes.items():
            if maker in own or action not in times:
                continue
            begin, end = times[action]
            if action.op is Op.F:
                later = (Action(action.stage, op, action.microbatch) for op in COMPUTES)
                end = max(times[other][1] for other in later if other in times)
            yield begin, end, size


@dataclass
class StepPeaks:
    """The most bytes of tensors that come in a step, at one moment."""

    activations: float = 0.0  # The peak of those that are gone at its end.
    with_gradients: float = 0.0  # The peak of all.


@contextmanager
def counted_step(pipe: Pipeline) -> Iterator[StepPeaks]:
    """Count what the one rank of this process holds in the step inside the `with` block; known at the block's end."""
    found = StepPeaks()
    with Arrivals(pipe) as arrivals, Allocations() as allocations:
        yield found
    every = [*allocations.blocks(), *arrivals.spans(allocations.actions)]
    found.activations = float(most_at_once(block for block in every if block[1] < STAYS))
    found.with_gradients = float(most_at_once(every))


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Count what tensors take here; of a sharded or spread one its own part, and what several share once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum({id(each): each.numel() * each.element_size() for each in local}.values())


def _all(events: list[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children
