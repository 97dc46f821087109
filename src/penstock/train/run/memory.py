"""What a run holds in memory, by kind: weights, gradients, optimizer, activations, and the process as a whole.

The first three are counted on the tensors themselves. Activations live within a step: while one runs, a thread asks
the C library how much memory is in use, and what that rises by, beside gradients, is activations and what computing
needs.
The process is what the system says is resident: Python and torch alone are some hundred megabytes of it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.train.run.progress import memory_now
from penstock.view.figures import table

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from penstock.pipeline import Pipeline

PAUSE = 0.001  # seconds between looks
WATCHED = (1, 2)  # steps of a start, counted from 0: in the first one, libraries are still being loaded


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, or of one rank where that is predicted."""

    weights: float
    gradients: float
    optimizer: float
    activations: float | None  # None where they could not be measured
    process: float


def memory_table(rows: Sequence[Memory], ranks: Sequence[Any] | None = None) -> str:
    """One line per rank, or per process where that is all of them, in megabytes."""
    kinds = [field.name for field in fields(Memory)]
    numbers = range(len(rows)) if ranks is None else ranks
    lines = [
        [str(number), *(_megabytes(getattr(row, kind)) for kind in kinds)]
        for number, row in zip(numbers, rows, strict=True)
    ]
    return table([["rank", *kinds], *lines])


def memory_document(rows: Sequence[Memory]) -> list[dict[str, Any]]:
    """The same for a file, in bytes."""
    return [asdict(row) for row in rows]


def _megabytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:,.{0 if count >= 1e8 else 1}f} MB"


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """What tensors take here; of a sharded or spread one its own part, and what several share once."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum({id(each): each.numel() * each.element_size() for each in local}.values())


class MemoryWatch:
    """Looks at the steps of a process at the beginning of its run."""

    def __init__(self, pipe: Pipeline, optimizer: Optimizer) -> None:
        self._pipe, self._optimizer = pipe, optimizer
        self._steps = 0
        self._gradients = 0
        self._activations: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step."""
        number, self._steps = self._steps, self._steps + 1
        if number not in WATCHED:
            yield
            return
        with _Peak() as peak:
            yield
        if peak.rise is not None:
            self._activations = max(self._activations or 0.0, peak.rise - self._gradients, 0.0)

    def see_gradients(self) -> None:
        """In a step, when all gradients are there."""
        self._gradients = max(self._gradients, bytes_of(parameter.grad for parameter in self._pipe.parameters()))

    def memory(self) -> Memory:
        """What there is now, and was at most."""
        state = [value for each in self._optimizer.state.values() for value in each.values()]
        own = [tensor for holding in self._pipe.deployment.holdings() for tensor in _tensors(holding.module)]
        return Memory(
            bytes_of(own),
            self._gradients,
            bytes_of(value for value in state if isinstance(value, Tensor)),
            self._activations,
            memory_now(),
        )


def _tensors(module: Any) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class _Peak:
    """How far the memory in use rises inside the `with` block; `rise` is None where the C library does not say."""

    def __init__(self) -> None:
        self.rise: float | None = None
        self._over = threading.Event()
        self._ask = in_use()

    def __enter__(self) -> _Peak:
        if self._ask is not None:
            self._start = self._most = self._ask()
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self

    def _look(self) -> None:
        assert self._ask is not None
        while not self._over.wait(PAUSE):
            self._most = max(self._most, self._ask())

    def __exit__(self, *_: object) -> None:
        if self._ask is not None:
            self._over.set()
            self._thread.join()
            self.rise = float(self._most - self._start)


_NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Info(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def in_use() -> Any:
    """A function that says how many bytes are allocated in this process; None where the C library has none."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _Info

    def used() -> int:
        info = ask()
        return int(info.uordblks + info.hblkhd)

    return used
