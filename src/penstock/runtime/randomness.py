"""Random numbers that depend on what is computed, not on when or where.

Before a stage computes a microbatch, the generator is seeded from (seed, step, microbatch,
stage). So dropout masks are the same under every schedule, on threads and on processes, in a
recomputed forward, and in a plain loop that uses `randomness` around each stage's call.

Torch has one generator for all threads of a process. Where ranks are threads, a compute that
draws from it must therefore have it alone: a readers-writer lock lets computes that draw
nothing run side by side and those that draw take turns. Which ones draw is found out by
running each for the first time alone and looking whether the generator moved; that a compute
draws after all is noticed and refused, because then masks would depend on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.errors import RunError

__all__ = ["RandomTurns", "randomness", "seed_of"]

_MASK = 2**64 - 1


def seed_of(seed: int, step: int, microbatch: int, stage: int) -> int:
    """The generator's seed for one compute: the four numbers, well mixed (splitmix64)."""
    state = seed & _MASK
    for number in (step, microbatch, stage):
        state = (state + 0x9E3779B97F4A7C15 * (number + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1  # manual_seed takes 63 bits on every device


def seed_generators(value: int, device: torch.device | None) -> None:
    """Seed the CPU generator, and the one of `device` where that is another."""
    torch.default_generator.manual_seed(value)
    if device is not None and device.type == "cuda":  # not run here: no GPU
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


@contextmanager
def randomness(seed: int, step: int, microbatch: int, stage: int) -> Iterator[None]:
    """Draw inside as the pipeline does in that compute; the generators are put back after."""
    before = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        torch.default_generator.manual_seed(seed_of(seed, step, microbatch, stage))
        for generator in torch.cuda.default_generators if cuda else ():
            generator.manual_seed(seed_of(seed, step, microbatch, stage))
        yield
    finally:
        torch.set_rng_state(before)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


class RandomTurns:
    """Who may use the one generator now. `alone` for what draws, `beside` for what does not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._draws: dict[object, bool] = {}

    @contextmanager
    def turn(self, key: object, seed: int) -> Iterator[None]:
        """Run one compute; `key` names it for what is remembered about it."""
        if self._draws.get(key, True):
            with self._alone():
                seed_generators(seed, None)
                before = torch.get_rng_state()
                yield
                if key not in self._draws:
                    self._draws[key] = not torch.equal(before, torch.get_rng_state())
            return
        with self._beside():
            before = torch.get_rng_state()
            yield
            moved = not torch.equal(before, torch.get_rng_state())
        if moved:
            self._draws = dict.fromkeys(self._draws, True)
            raise RunError(
                f"{key} draws random numbers, but did not when it first ran; on threads its numbers would "
                f"depend on timing. Run the step again (from now on it takes turns), or use processes"
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._changed:
            self._writers_waiting += 1
            while self._writing or self._readers:
                self._changed.wait()
            self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        with self._changed:
            while self._writing or self._writers_waiting:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()
