"""Random numbers that depend on what is computed, not on when or where.

Before a stage computes a microbatch, the generator is seeded from (seed, step, microbatch,
stage). So dropout masks are the same under every schedule, on threads and on processes, in a
recomputed forward, and in a plain loop that uses `randomness` around each stage's call.

Torch has one generator for all threads of a process, and one for each device. Where ranks are threads, a compute that
draws from one must therefore have it alone: a readers-writer lock (`GeneratorLock`) lets computes that
draw nothing run side by side and those that draw take turns (`ThreadRandomness` knows which); ranks that draw on
devices of their own do not wait for each other. That a compute draws after all is noticed and refused, because then
masks would depend on timing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.devices import CPU, generator_of, generators, on_accelerator
from penstock.errors import RunError
from penstock.model.random_states import HELD, random_state, restore_random, seed_torch, set_torch_state, torch_state

_MASK = 2**64 - 1
FEW = 16  # numbers, for which an array costs more than it saves
RESTING = 0  # the seed of the generator while nothing draws; `seed_of` never gives it
BEAT = 0.25  # seconds: how often a thread that waits for the generator looks whether that is still worth it

WhileWaiting = Callable[[list[int] | None], None]  # the threads that one waits for, by ident; None: no more


def seed_of(seed: int, step: int, microbatch: Any, stage: int) -> Any:
    """The generator's seed for one compute: the four numbers, well mixed (splitmix64).

    Of an array of microbatches, as 64-bit numbers without a sign, it gives the array of their seeds.
    """
    state: Any = seed & _MASK
    for number in (step, microbatch, stage):
        state = (state + (0x9E3779B97F4A7C15 * (number + 1) & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 1) | 1  # manual_seed takes 63 bits on every device; never 0, which means at rest


@contextmanager
def randomness(seed: int, step: int, microbatch: int, stage: int) -> Iterator[None]:
    """Draw random numbers inside the `with` block exactly as the pipeline does in one forward.

    Use it to compare your own loop with a pipeline. The generators are restored afterwards.

    Args:
        seed: The pipeline's seed.
        step: The number of the step.
        microbatch: The number of the microbatch.
        stage: The stage.
    """
    before = random_state()
    try:
        for generator in (torch.default_generator, *generators()):
            seed_torch(seed_of(seed, step, microbatch, stage), generator)
        yield
    finally:
        restore_random(before)


class _Drawn(threading.local):
    """Where units have drawn in the compute that runs on a thread."""

    def __init__(self) -> None:
        self.on: set[torch.device] = set()


_DRAWN = _Drawn()


@contextmanager
def unit_stream(number: int, devices: Iterable[torch.device] = (CPU,)) -> Iterator[None]:
    """Inside a compute: random numbers of its own for one unit call of a model that is replayed.

    They follow from the compute's seed and the call's number, and the stream of the code around goes on
    afterwards as if the call had drawn nothing: so masks depend neither on where the model is cut nor on which
    calls a stage makes. Where nothing draws (the generator rests), it is left alone.
    """
    before = []
    for device in devices:
        generator = generator_of(device)
        base = generator.initial_seed()
        if base != RESTING:
            around = torch_state(generator)
            seed_torch(seed_of(base, 0, 0, number), generator)
            before.append((device, generator, around, torch_state(generator)))
    try:
        yield
    finally:
        for device, generator, around, fresh in before:
            if not torch.equal(fresh, torch_state(generator)):
                _DRAWN.on.add(device)
            set_torch_state(around, generator)


@contextmanager
def held(device: torch.device, quietly: bool) -> Iterator[None]:
    """Around a compute that has the generator of a device."""
    before = swap_holding({**HELD.quietly, device: quietly})
    try:
        yield
    finally:
        swap_holding(before)


def swap_holding(quietly: dict[torch.device, bool]) -> dict[torch.device, bool]:
    """Set what the code on this thread has of the generators, where several take turns on it; return what it had."""
    before, HELD.quietly = HELD.quietly, quietly
    return before


def needs_to_be_alone(why: str) -> None:
    """Note that the compute on this thread must not run beside others; raise if it does."""
    if HELD.quietly.get(CPU):
        raise RunError(
            f"a stage {why}, and did not when it first ran, so that others run beside it; use processes, or let its "
            f"first forward do so too"
        )
    _DRAWN.on.add(CPU)  # whose generator every compute takes first


class GeneratorLock:
    """Who may use the one generator of a device now: one compute alone, or several that draw nothing.

    While computes run beside each other the generator rests in one known state. So that it is still there after each
    says that none of them drew, and a checkpoint that takes the state in its forward and sets it again in its
    backward changes nothing.
    """

    def __init__(self, device: torch.device = CPU, quiet: bool = False) -> None:
        self.device = device
        self.quiet = quiet  # nothing in it may draw
        self._generator = generator_of(device)
        self._changed = threading.Condition()
        self._who: list[int] = []  # the threads inside
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0
        self._at_rest = False
        self._inside = 0
        self._rest: Tensor  # the generator's state while it rests
        self._users: Tensor

    @contextmanager
    def around_step(self, takes_turns: bool) -> Iterator[GeneratorLock]:
        """This lock; or, in a compute that has it, one for a pipeline inside that compute, which has it no less.

        Without `takes_turns` the one rank of this process has it for the whole step.
        """
        quietly = HELD.quietly.get(self.device)
        lock = self if quietly is None else GeneratorLock(self.device, quietly)
        with lock.kept(), nullcontext() if takes_turns else held(self.device, quietly=False):
            yield lock

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a whole step: afterwards the generator is where the user had left it."""
        with self._changed:
            if not self._inside:
                self._users = torch_state(self._generator)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._at_rest = False
                if not self._inside:
                    set_torch_state(self._users, self._generator)

    def _wait(self, is_taken: Callable[[], bool], waits: WhileWaiting) -> None:
        """Until it is free; `waits` hears from time to time who is inside, and gives up by raising."""
        try:
            while is_taken():
                if not self._changed.wait(BEAT):
                    waits(self._who)
            self._who.append(threading.get_ident())
        finally:
            waits(None)

    def _leave(self) -> None:
        self._who.remove(threading.get_ident())
        self._changed.notify_all()

    @contextmanager
    def alone(self, waits: WhileWaiting) -> Iterator[None]:
        """For what draws, or may draw."""
        with self._changed:
            self._writers_waiting += 1
            try:
                self._wait(lambda: self._writing or self._readers > 0, waits)
            finally:
                self._writers_waiting -= 1
            self._writing = True
            self._at_rest = False
        try:
            with held(self.device, quietly=False):
                yield
        finally:
            with self._changed:
                self._writing = False
                self._leave()

    @contextmanager
    def beside(self, waits: WhileWaiting) -> Iterator[Callable[[], bool]]:
        """For what draws nothing; yields a question: whether something here drew after all."""
        with self._changed:
            self._wait(lambda: self._writing or self._writers_waiting > 0, waits)
            if not self._at_rest and not self._readers:
                seed_torch(RESTING, self._generator)
                self._rest = torch_state(self._generator)
                self._at_rest = True
            self._readers += 1
        try:
            with held(self.device, quietly=True):
                yield self._moved
        finally:
            with self._changed:
                self._readers -= 1
                self._leave()

    def _moved(self) -> bool:
        moved = not torch.equal(self._rest, torch_state(self._generator))
        if moved:
            self._at_rest = False
        return moved


_LOCKS: dict[torch.device, GeneratorLock] = {}  # of this process: torch has one generator for each device


@contextmanager
def generators_of_step(
    devices: Iterable[torch.device], takes_turns: bool
) -> Iterator[Mapping[torch.device, GeneratorLock]]:
    """Enter a step that may draw on these devices; yield whose turn it is, see `GeneratorLock.around_step`."""
    with ExitStack() as stack:
        locks = (_LOCKS.get(each) or _LOCKS.setdefault(each, GeneratorLock(each)) for each in devices)
        yield {lock.device: stack.enter_context(lock.around_step(takes_turns)) for lock in locks}


class StepCounter:
    """Which step it is, for the random numbers; evaluation has a count of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.evaluations = 0
        self.training = True
        self.first = 0  # the number of this replica's first microbatch among those of all
        self.is_apart = False  # whether ranks have completed or updated other steps, until these are loaded

    def seed_for(self, microbatch: Any, stage: int) -> Any:
        """The seed of one compute of the step that runs now; or of several, see `seed_of`."""
        if self.training:
            return seed_of(self.seed, self.step, microbatch + self.first, stage)
        return seed_of(~self.seed, self.evaluations, microbatch + self.first, stage)

    def seeds_for(self, microbatches: int, stage: int) -> list[int]:
        """The seeds of all of them."""
        if microbatches < FEW:
            return [self.seed_for(number, stage) for number in range(microbatches)]
        seeds: list[int] = self.seed_for(np.arange(microbatches, dtype=np.uint64), stage).tolist()
        return seeds


class StageRandomness(NamedTuple):
    """What surrounds the computes of a stage, by microbatch, with their random numbers; None: nothing to enter.

    A rank that has the process's generators to itself enters nothing: before each forward its `own` are seeded, and
    `seeds` has the seeds of a step's microbatches, by their count.
    """

    forward: Callable[[int], AbstractContextManager[None]] | None
    backward: Callable[[int], AbstractContextManager[None]] | None
    seeds: Callable[[int], list[int]] | None = None
    own: RankGenerators | None = None


class RankGenerators:
    """The generators that the stages of a rank may draw from: the CPU's, and that of the device they are on."""

    def __init__(self) -> None:
        self.draw_on(CPU)

    def draw_on(self, device: torch.device) -> None:
        """Set the device that the stages are on now."""
        self.home = device
        self.devices: tuple[torch.device, ...] = (CPU, device) if on_accelerator(device) else (CPU,)
        self.generators = tuple(map(generator_of, self.devices))

    def unit_stream(self, number: int) -> AbstractContextManager[None]:
        """Return the context of one unit call in a stage of this rank."""
        return unit_stream(number, self.devices)


def seeded(counter: StepCounter, stream: int, rank: RankGenerators) -> StageRandomness:
    """Return what the computes of a stage need on a rank that has the process's generators to itself."""
    return StageRandomness(None, None, lambda count: counter.seeds_for(count, stream), rank)


Compute = tuple[int, int, torch.device]  # stage and microbatch, and where it draws


class ThreadRandomness:
    """The computes of a pipeline's stages, each with its random numbers, where ranks are threads.

    Which forwards draw, and on which device, is found out by running the first alone and looking whether a generator
    moved, again for each combination of the modules' training modes. A backward runs as its forward did: where that
    drew, a checkpoint inside may draw again.
    """

    def __init__(self, seed_for: Callable[[int, int], int], waits: WhileWaiting) -> None:
        self._locks: Mapping[torch.device, GeneratorLock] = {}
        self._waits = waits
        self._seed_for = seed_for  # (microbatch, stage)
        self._modules: dict[int, list[torch.nn.Module]] = {}
        self._modes: dict[int, object] = {}
        self._draws: dict[tuple[int, object, torch.device], bool] = {}
        self.alone: set[Compute] = set()  # those whose forward had the generator alone
        self._suspect = False

    def of(self, stage: int, stream: int, module: torch.nn.Module, rank: RankGenerators) -> StageRandomness:
        """Return what surrounds the computes of a stage."""
        self._modules[stage] = list(module.modules())
        return StageRandomness(
            partial(self._around, stage, stream, rank, "F"), partial(self._around, stage, stream, rank, "B")
        )

    def begin(self, locks: Mapping[torch.device, GeneratorLock], alone: Iterable[Compute] = ()) -> None:
        """Begin a step, or the second half of one: `alone` is then what the first half left."""
        self._locks = locks
        self._modes = {stage: tuple([m.training for m in modules]) for stage, modules in self._modules.items()}
        self.alone = set(alone)

    def forget(self) -> None:
        """The model was set to something else: which forwards draw is to be found out again."""
        self._draws.clear()

    @property
    def draw(self) -> bool:
        """Whether a forward of the step that ran last draws."""
        return any(self._draws.get((*each, device)) for each in self._modes.items() for device in self._locks)

    def _around(
        self, stage: int, stream: int, rank: RankGenerators, kind: str, microbatch: int
    ) -> AbstractContextManager[Any]:
        each = [self._on(device, stage, stream, kind, microbatch) for device in rank.devices]
        return each[0] if len(each) == 1 else _entered(each)

    @contextmanager
    def _on(self, device: torch.device, stage: int, stream: int, kind: str, microbatch: int) -> Iterator[None]:
        """Around a compute, as far as it concerns the generator of one device."""
        forward, known, lock = kind == "F", (stage, self._modes[stage], device), self._locks[device]
        compute = (stage, microbatch, device)
        takes = (self._suspect or self._draws.get(known, True)) if forward else compute in self.alone
        if takes and not lock.quiet:
            generator = generator_of(device)
            with lock.alone(self._waits):
                seed_torch(self._seed_for(microbatch, stream), generator)
                self.alone.add(compute)
                before = None if not forward or known in self._draws else torch_state(generator)
                _DRAWN.on.discard(device)
                yield
                if before is not None:
                    self._draws[known] = device in _DRAWN.on or not torch.equal(before, torch_state(generator))
            return
        with lock.beside(self._waits) as moved:
            yield
            drew = moved()
        if drew:
            self._suspect = True
            raise RunError(
                f"{kind} of stage {stage}, or of a stage that ran beside it, draws random numbers, but did not when it "
                f"first ran; on threads its numbers would depend on timing. Run the step again (from now on all take "
                f"turns), or use processes"
            )


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
