"""A rehearsal of training itself: your function on every rank, on virtual time, with checkpoints, deaths and restarts.

What runs is the real code from the function down: `Pipeline` with its stages and tensors, `step` or `train_steps`, the
optimizer, the exchange that ends a step, the `Checkpointer` with its files. Each rank is a task with a clock, a network
link, a random generator and a background thread of its own. Computations, messages and work on files take their stated
time, so that a rank may die at any moment, such as between its part of a checkpoint and the rename that completes it.

An attempt in which a rank fails ends as under a launcher: every process ends where it is, and the disk stays as it is
at that moment. The next attempt begins with new processes, and finds what there is.
"""

from __future__ import annotations

import math
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import PenstockError, UsageError
from penstock.parallel.group.world import BUILDING, REHEARSED, World
from penstock.runtime.engine.executor import Executor
from penstock.runtime.engine.ranks import calling
from penstock.runtime.state.randomness import swap_holding
from penstock.runtime.transport.base import Where, nowhere
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure.watch import BEAT_SECONDS
from penstock.runtime.transport.interrupts import CtrlC
from penstock.schedule import Costs, Op, Schedule
from penstock.tools.rehearsal.faults import PlannedFault
from penstock.tools.rehearsal.keyboard import Keyboard, swap_ctrl_c
from penstock.tools.rehearsal.network import Parcel
from penstock.tools.rehearsal.rank import InjectedError, RehearsedRank, Setting
from penstock.tools.rehearsal.rehearse import checked, limit_of, make_setting, plan_faults
from penstock.tools.rehearsal.transport import Message, RehearsalTransport
from penstock.tools.rehearsal.virtual_time import RankClock, Task, VirtualTime

Train = Callable[[int], Any]  # what a rank runs, given its number
Fault = PlannedFault | str


@dataclass(frozen=True)
class Attempt:
    """What came of one attempt to train.

    Attributes:
        results: What the function returned, for each rank; `None` for a rank on which it did not return.
        errors: What it raised instead; `None` for a rank on which it returned, or whose process ended.
        returned: The ranks on which the function returned.
        struck: The faults that happened.
        hung: Ranks that neither ended nor were told to stand still.
        seconds: When the last rank was done.
    """

    results: tuple[Any, ...]
    errors: tuple[PenstockError | InjectedError | KeyboardInterrupt | None, ...]
    struck: tuple[PlannedFault, ...]
    hung: tuple[int, ...]
    seconds: float
    returned: tuple[int, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the function has returned on every rank."""
        return len(self.returned) == len(self.results)


def rehearse_training(
    train: Train,
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    faults: Sequence[Iterable[Fault]] = (),
    folder: str | Path | None = None,
    seed: int = 0,
    steps: int = 1000,
    timeout: float = 60.0,
    jitter: float = 0.0,
    file_seconds: float = 0.0,
    store_host: int | None = None,
    interrupts_waits: bool = True,
) -> tuple[Attempt, ...]:
    """Run your training function on every rank, on virtual time, again and again until it ends well on all of them.

    The function is what a script does under torchrun: it builds a model and its `Pipeline` (one, with this schedule),
    loads the newest checkpoint if there is one, and trains. All ranks are in this process, so a function that draws
    from torch's generator has to seed it, and nothing of it may be shared between ranks but files. An exception of it
    that is neither Penstock's nor a fault by plan ends the rehearsal, and is raised here.

    Args:
        train: The function; it is given the number of its rank.
        schedule: The schedule of its pipeline, for the number of ranks and the names of actions.
        costs: Times of computations and messages. By default, `F`, `I` and `W` take 1 second each.
        faults: For each attempt in turn, what goes wrong in it, such as `[["die 3 at 12.5"], ["fail 0 at 0F1"]]`. After
            these there is one more, without any.
        folder: Where the function writes. After an attempt that was ended by a fault, it is put back to what was there
            when the last rank was done.
        seed: Which interleaving: the order of what is due at the same moment, and the jitter.
        steps: The most steps that an attempt may take; one that goes on for longer than these would hangs.
        timeout: As of `Pipeline`: how long a rank may be silent.
        jitter: Relative spread of the time of each computation and message, and of how fast ranks work on files.
        file_seconds: How long each work on a file takes: one that is written, and the deletion of old checkpoints.
        store_host: The rank whose process has the store of the process group. By default the launcher has it.
        interrupts_waits: Whether Ctrl-C reaches a rank that waits for another, as with shared memory. With gloo it
            comes when the wait is over.

    Returns:
        What came of each attempt. The last one ended well, or had no faults.
    """
    if not callable(train):
        raise UsageError(f"train={train!r}: pass a function of a rank's number")
    if not isinstance(file_seconds, (int, float)) or not 0 <= file_seconds < math.inf:
        raise UsageError(f"file_seconds is a number of seconds, 0 or more; got {file_seconds!r}")
    if isinstance(faults, str) or any(isinstance(each, (str, PlannedFault)) for each in faults):
        raise UsageError(f'faults has one list per attempt, such as [["die 1 at 15"], []]; got {faults!r}')
    found: list[Attempt] = []
    for number, planned in enumerate([*faults, ()]):
        program, priced, checked_faults = checked(schedule, costs, seed, planned, steps, timeout, jitter, store_host)
        attempt = _Attempt(train, file_seconds, None if folder is None else Path(folder), interrupts_waits)
        time = ProcessTime(seed + number, -BEAT_SECONDS)
        setting = make_setting(program, priced, time, store_host, timeout, steps, jitter, seed + number, False)
        until = limit_of(program, priced, checked_faults, steps, timeout + 100 * file_seconds, jitter)
        found.append(attempt.run(setting, checked_faults, until))
        if found[-1].is_complete:
            break
    return tuple(found)


class ProcessTime(VirtualTime):
    """Virtual time for tasks that use torch: each has the state of its own process and thread while it runs."""

    def __init__(self, seed: int, start: float = 0.0) -> None:
        super().__init__(seed, start)
        self.keyboards: dict[Task, Keyboard] = {}  # Keys are the tasks that are ranks' main threads.
        self.is_switching = False  # whether nobody's code runs

    def wait(self, until: float = float("inf")) -> None:
        grad, generator, holding = torch.is_grad_enabled(), torch.get_rng_state(), swap_holding({})
        self.is_switching = True
        keyboard, ctrl_c = self.keyboards.get(self.current), swap_ctrl_c(vars(CtrlC()))
        torch._C._set_grad_enabled(True)
        try:
            super().wait(until)
        finally:
            self.is_switching = True  # a task that has ended has not set it
            torch._C._set_grad_enabled(grad)
            torch.set_rng_state(generator)
            swap_holding(holding)
            swap_ctrl_c(ctrl_c)
            self.is_switching = False
        if keyboard is not None:
            keyboard.look()


class _Attempt:
    """One attempt: its ranks from their beginning to their end."""

    def __init__(self, train: Train, file_seconds: float, folder: Path | None, interruptible: bool) -> None:
        self._train, self._file_seconds, self._folder = train, file_seconds, folder
        self._interruptible = interruptible

    def run(self, setting: Setting, faults: Sequence[PlannedFault], until: float) -> Attempt:
        time, draw = setting.network.time, random.Random(setting.seed)
        ranks = [
            TrainedRank(rank, setting, self._train, self._file_seconds, self._interruptible)
            for rank in range(setting.program.ranks)
        ]
        for rank in ranks:
            rank.task = time.start(rank.rank, rank.live, -BEAT_SECONDS * draw.random())
        plan_faults(faults, ranks, time, setting.program)
        generator, ctrl_c = torch.get_rng_state(), swap_ctrl_c(vars(CtrlC()))
        try:
            time.run(lambda: not setting.unsettled, until)
            seconds = time.now
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            self._end(time)
            torch.set_rng_state(generator)
            swap_ctrl_c(ctrl_c)
        return Attempt(
            tuple(rank.result for rank in ranks),
            tuple(rank.error for rank in ranks),
            tuple(fault for rank in ranks for fault in rank.struck),
            tuple(sorted(setting.unsettled)),
            seconds,
            tuple(rank.rank for rank in ranks if rank.ended and rank.error is None),
        )

    def _end(self, time: VirtualTime) -> None:
        """End all processes. They leave by an exception here, and on their way out tidy up what a kill would not."""
        kept = None
        if self._folder is not None and self._folder.exists():
            kept = self._folder.with_name(f"{self._folder.name}.as-it-was")
            shutil.copytree(self._folder, kept, symlinks=True)
        time.close()
        if kept is not None and self._folder is not None:
            shutil.rmtree(self._folder)
            kept.rename(self._folder)


class RehearsedWorld(World):
    """The ranks of a rehearsal, as a pipeline sees them."""

    def __init__(self, transport: RehearsalTransport) -> None:
        super().__init__(None, transport.ranks, transport.timeout)
        self._own = transport

    @property
    def rank(self) -> int:
        return self._own.rank

    @contextmanager
    def meeting(self) -> Iterator[RehearsalTransport]:
        with calling(self._own, BUILDING):
            yield self._own

    def _connect(self, device: torch.device | str | None) -> RehearsalTransport:
        self.transport = self._own
        return self._own


class TrainingTransport(RehearsalTransport):
    """A rank's transport that tells it of the executor and of the channels that its pipeline uses."""

    holds_interrupts = True

    def __init__(self, owner: TrainedRank, setting: Setting, clock: RankClock) -> None:
        self._owner = owner
        super().__init__(
            *(owner.rank, setting.program.ranks, setting.network, setting.store, setting.timeout),
            *(owner.stamp, owner.posted, clock),
        )

    def describe_by(self, doing: Callable[[], str], where: Where = nowhere) -> None:
        super().describe_by(doing, where)
        executor = getattr(doing, "__self__", None)
        if isinstance(executor, Executor):
            self._owner.pace(executor)

    def open(self, channels: Sequence[Channel]) -> None:
        super().open(channels)
        self._owner.channels = tuple(self.ends.channels)


class TrainedRank(RehearsedRank):
    """One rank that runs the user's training function."""

    def __init__(self, rank: int, setting: Setting, train: Train, file_seconds: float, interruptible: bool) -> None:
        super().__init__(rank, setting)
        self._train, self._file_seconds, self._interruptible = train, file_seconds, interruptible
        setting.network.interruptible = interruptible
        self._executor: Executor | None = None
        self._ways: dict[Channel, tuple[float, float]] = {}
        self.task: Task
        self.keyboard = Keyboard(self._is_running)
        self.result: Any = None
        self.error: PenstockError | InjectedError | KeyboardInterrupt | None = None

    def live(self) -> None:
        """Run the function once, as the process of a rank does."""
        time = self._time
        assert isinstance(time, ProcessTime)
        time.keyboards[self.task] = self.keyboard
        swap_ctrl_c(self.keyboard.ctrl_c)
        REHEARSED.set(self._world)
        try:
            self.result = self._train(self.rank)
        except (PenstockError, InjectedError, KeyboardInterrupt) as error:
            if time.over:
                return
            self.error = error
        self._setting.network.close(self.rank)  # A process that ends closes its connections.
        self.ended = True
        self._setting.unsettled.discard(self.rank)

    def _is_running(self) -> bool:
        assert isinstance(self._time, ProcessTime)
        return self._time.current is self.task and not self._time.is_switching

    def press(self, lines: int) -> None:
        self.keyboard.press(lines)
        if self._interruptible and not lines:
            self._time.wake(self.task, self._time.now)

    def _world(self) -> RehearsedWorld:
        if self._executor is not None:
            raise UsageError("a rehearsal is of one Pipeline per rank; close() does not make room for another")
        pace = max(0.0, self._random.gauss(1.0, self._setting.jitter))
        clock = RankClock(self._time, self.rank, pace * self._file_seconds)
        transport = TrainingTransport(self, self._setting, clock)
        self._time.sleep(-self._time.now)  # faults count from here
        return RehearsedWorld(transport)

    def pace(self, executor: Executor) -> None:
        """Make the executor's computations take their stated time from here on."""
        self._executor = executor
        self._ways = dict(zip(executor.mailbox.channels, self._setting.ways, strict=True))
        for op, function in list(executor.computes.items()):
            executor.computes[op] = self._paced(op, function, executor)

    def _paced(self, op: Op, function: Callable[[int, int], None], executor: Executor) -> Callable[[int, int], None]:
        def compute(stage: int, microbatch: int) -> None:
            if op is not Op.W:
                executor.mailbox.fetch("F" if op is Op.F else "B", stage, microbatch)
            step_input = executor.computations.step_input
            self._step = -1 if step_input.steps is None or not step_input.training else step_input.steps
            self._spend(op, stage, microbatch)
            function(stage, microbatch)

        return compute

    def stamp(self, channel: int, message: Message) -> Parcel:
        """Decide what becomes of a message on its way; between processes, values are copied."""
        message = message._replace(value=pytree.tree_map_only(Tensor, _copied, message.value))
        if self.channels[channel] in self._ways:
            return super().stamp(channel, message)
        return Parcel(message, 0.0, self._setting.network.latency(self.rank, self.channels[channel].target_rank))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
