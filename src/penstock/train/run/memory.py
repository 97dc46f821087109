"""What a run holds in memory, by kind: weights, gradients, optimizer, activations, and the process as a whole.

The first three are counted on the tensors themselves. Activations live within the passes of a step: while one runs, a
thread asks the C library again and again how much memory is in use, and the most that it has risen by, beside the
gradients there are at that moment, is activations and what computing needs. A dry run predicts the same number
(`activations`).
The process is what the system says is resident: Python and torch alone are some hundred megabytes of it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
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

PAUSE = 0.0002  # seconds between looks: what a kernel needs is soon gone
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
        self._parameters = list(pipe.parameters())
        self._steps = 0
        self._peak: Peak | None = None
        self._gradients = 0
        self._activations: float | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step."""
        number, self._steps = self._steps, self._steps + 1
        if number not in WATCHED:
            yield
            return
        with Peak(PAUSE, self._gradients_now) as self._peak:
            yield
        if self._peak.rise is not None:
            self._activations = max(self._activations or 0.0, self._peak.rise)

    def see_gradients(self) -> None:
        """In a step, when all gradients are there."""
        if self._peak is not None:
            self._peak.end()  # what the optimizer needs for a moment is no activation
        self._gradients = max(self._gradients, self._gradients_now())

    def _gradients_now(self) -> int:
        return bytes_of(parameter.grad for parameter in self._parameters)

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


class Peak:
    """How far the memory in use rises inside the `with` block, and how it has changed at its end.

    Bytes that `beside` counts at the moment of a look are left out. Both numbers are None where the C library does not
    say what is in use.
    """

    def __init__(self, pause: float, beside: Callable[[], int] | None = None) -> None:
        self.rise: float | None = None
        self.change: float | None = None
        self._pause, self._beside = pause, beside
        self._over = threading.Event()
        self._ask = in_use()

    def __enter__(self) -> Peak:
        if self._ask is not None:
            self._start = self._most = self._now()
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        return self

    def _now(self) -> int:
        assert self._ask is not None
        return int(self._ask()) - (0 if self._beside is None else self._beside())

    def _look(self) -> None:
        while not self._over.wait(self._pause):
            self._most = max(self._most, self._now())

    def end(self) -> None:
        """Look no further."""
        if self._ask is not None and self.rise is None:
            self._over.set()
            self._thread.join()
            self.change = float(self._now() - self._start)
            self.rise = max(float(self._most - self._start), self.change)

    def __exit__(self, *_: object) -> None:
        self.end()


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
