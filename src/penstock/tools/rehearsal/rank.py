"""One rank of a rehearsal: its process, which runs the real executor for some steps, and what it lives through."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from penstock.errors import PeerFailure, PenstockError
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.engine.computations import Mailbox
from penstock.runtime.engine.executor import Executor
from penstock.runtime.engine.handlers import Context
from penstock.runtime.engine.step_input import StepInput
from penstock.runtime.loss.shares import Shares
from penstock.runtime.transport.channel import Channel
from penstock.schedule import Action, Costs, Op, Schedule
from penstock.tools.rehearsal.faults import PlannedFault
from penstock.tools.rehearsal.network import Network, Parcel, Store
from penstock.tools.rehearsal.stage import RehearsedStage, loss_of
from penstock.tools.rehearsal.transport import Message, RehearsalTransport
from penstock.tools.rehearsal.virtual_time import EVERYWHERE

Done = tuple[int, Op, int, int | None]  # an action as its stage, op, microbatch and peer


class InjectedError(RuntimeError):
    """What a computation raises that is to fail."""


class StepDone(NamedTuple):
    """What one rank has of a step that it has completed."""

    loss: float | None
    losses: list[float]
    gradients: dict[int, int]  # By stage.


class Notice(NamedTuple):
    """A rank heard that a step failed.

    Attributes:
        rank: The rank that heard of it.
        step: In which step.
        time: When it knew.
        error: What it raised; a `PeerFailure` names a rank.
    """

    rank: int
    step: int
    time: float
    error: PenstockError | InjectedError

    @property
    def named(self) -> int | None:
        """The rank that is named as the cause, if one is."""
        return self.error.rank if isinstance(self.error, PeerFailure) else None


class Setting(NamedTuple):
    """What all ranks of a rehearsal have in common."""

    program: Schedule
    costs: Costs
    network: Network
    store: Store
    timeout: float
    steps: int
    batch: Batch
    times: list[tuple[float, ...]]  # Seconds, by op and stage.
    sizes: tuple[float, ...]  # By microbatch.
    # Of each channel, how long a message occupies its link, and how long it takes to arrive.
    ways: list[tuple[float, float]]
    jitter: float
    seed: int
    record: bool
    unsettled: set[int]  # ranks that have neither ended nor been struck by what they never come back from


class RehearsedRank:
    """One rank: `live` is its process."""

    def __init__(self, rank: int, setting: Setting) -> None:
        self.rank = rank
        self._setting = setting
        self._time = setting.network.time
        self._random = random.Random(setting.seed * 1_000_003 + rank)
        self.strikes: dict[
            tuple[int, Op, int, int, int | None], list[PlannedFault]
        ] = {}  # Keys are (step, op, stage, microbatch, peer).
        self.struck: list[PlannedFault] = []
        self.factor = 1.0  # Multiplies the times of its computations.
        self.stalled_until = -math.inf
        self.failing: PlannedFault | None = None
        self._share = 1.0  # Share of time that each part of an overlapped pair takes.
        self._step = 0
        self.channels: tuple[Channel, ...] = ()
        self.ended = False
        self.done: dict[int, StepDone] = {}
        self.notices: list[Notice] = []
        self.order: list[Done] = []
        # Of each step, when the first computation began and the last one ended.
        self.computes: dict[int, list[float]] = {}

    # -- the process

    def live(self) -> None:
        """Train for some steps, as a user does who catches the error of a failed step and goes on if he can."""
        setting, time, program = self._setting, self._time, self._setting.program
        placement, topology = program.placement, program.topology
        transport = RehearsalTransport(
            *(self.rank, program.ranks, setting.network, setting.store, setting.timeout),
            *(self.stamp, self.posted),
        )
        mailbox = Mailbox(self.rank, placement, topology, transport)
        self.channels = mailbox.channels
        stages = {stage: RehearsedStage(stage, topology, self._spend) for stage in placement.stages_of(self.rank)}
        executor = Executor(self.rank, stages, mailbox, transport)
        if setting.costs.overlap is not None:
            executor.register(Op.OVERLAP_F_B, self._overlapped)
            executor.register(Op.OVERLAP_B_F, self._overlapped)
        time.sleep(-time.now)
        for step in range(setting.steps):
            self._step = step
            for stage in stages.values():
                stage.step = step
            try:
                reports = executor.run(program, self._given(), together=True).reports()
            except (PenstockError, InjectedError) as error:
                if time.over:  # the rehearsal has ended, and this task with it
                    return
                self.notices.append(Notice(self.rank, step, time.now, error))
                if transport.broken is not None:
                    break
            else:
                last = reports[placement.rank_of(program.stages - 1)]
                gradients = {index: stage.gradient for index, stage in stages.items()}
                self.done[step] = StepDone(last.loss, last.losses_by_number, gradients)
        self.ended = True
        setting.unsettled.discard(self.rank)

    def _given(self) -> StepInput:
        batch = self._setting.batch
        return StepInput(
            batch,
            Shares(len(batch.args), 1.0 / len(batch.args)),
            loss_of,
            training=not self._setting.program.forward_only,
            steps=len(self.done),
        )

    def _overlapped(self, pair: Action, context: Context) -> None:
        """Run both halves at once: they wait for what both need, and take their share of the sum of their times."""
        context.fetch(pair)
        first, second = pair.parts()
        forward, backward = (first, second) if first.op is Op.F else (second, first)
        share = self._setting.costs.pair_share(forward.stage, backward.stage)
        self._share = 1.0 if share is None else share
        context.compute(pair)
        self._share = 1.0

    # -- what its stages and channels tell

    def _spend(self, op: Op, stage: int, microbatch: int) -> None:
        """Spend the time that a computation takes."""
        setting, time = self._setting, self._time
        if self.strikes:
            for fault in self.strikes.pop((self._step, op, stage, microbatch, None), ()):
                self.strike(fault)
        seconds = setting.times[op][stage] * setting.sizes[microbatch] * self.factor * self._share
        if setting.jitter:
            seconds *= max(0.0, self._random.gauss(1.0, setting.jitter))
        begin = time.now
        if seconds:
            time.sleep(seconds)
        while self.stalled_until > time.now:
            time.wait(self.stalled_until)
        if self.failing is not None:
            fault, self.failing = self.failing, None
            self.struck.append(fault)
            raise InjectedError(f"as planned: {fault}")
        around = self.computes.get(self._step)
        if around is None:
            self.computes[self._step] = [begin, time.now]
        else:
            around[1] = time.now
        if setting.record:
            self.order.append((stage, op, microbatch, None))

    def posted(self, channel_number: int, microbatch: int) -> None:
        if self._setting.record:
            channel = self.channels[channel_number]
            op = Op.RECV_F if channel.direction == "F" else Op.RECV_B
            self.order.append((channel.target_stage, op, microbatch, channel.source_stage))

    def stamp(self, channel_number: int, message: Message) -> Parcel:
        """Decide what becomes of a message on its way."""
        setting, microbatch = self._setting, message.microbatch
        channel = self.channels[channel_number]
        occupied, delay = setting.ways[channel_number]
        fate = ""
        if message.failure is None:
            op = Op.SEND_F if channel.direction == "F" else Op.SEND_B
            if self.strikes:
                key = self._step, op, channel.source_stage, microbatch, channel.target_stage
                for fault in self.strikes.pop(key, ()):
                    self.struck.append(fault)
                    fate = fault.kind
            if setting.record:
                self.order.append((channel.source_stage, op, microbatch, channel.target_stage))
        if setting.jitter:
            delay *= max(0.0, self._random.gauss(1.0, setting.jitter))
        return Parcel(message, occupied * setting.sizes[microbatch], delay, fate)

    # -- what it lives through

    def strike(self, fault: PlannedFault) -> None:
        """Carry out the fault now; a computation that is to fail does so as it ends."""
        if fault.kind != "fail":
            self.struck.append(fault)
        if fault.is_fatal:
            self._setting.unsettled.discard(self.rank)
        until = self._time.now + fault.seconds
        if fault.kind == "slow":
            self.factor *= fault.factor
            if until < math.inf:
                self._time.start(EVERYWHERE, lambda: self._recover(fault.factor), until)
        elif fault.kind == "stall":
            self.stalled_until = max(self.stalled_until, until)
        elif fault.kind == "fail":
            self.failing = fault
        elif fault.kind == "interrupt":
            self.press(fault.lines)
        else:
            if fault.kind == "die":
                self._setting.network.close(self.rank)
            self._time.stop(self.rank, until)
            if self._time.current.rank == self.rank:
                self._time.wait(until)

    def press(self, lines: int) -> None:
        """Press Ctrl-C, where this rank runs a script."""

    def _recover(self, factor: float) -> None:
        self.factor /= factor
