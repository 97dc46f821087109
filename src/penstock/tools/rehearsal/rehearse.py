"""Runs a schedule on the real runtime of all its ranks, on virtual time, with the faults that were planned."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from penstock.errors import UsageError
from penstock.rules import check_count
from penstock.runtime.batch.microbatch import Batch
from penstock.runtime.transport.failure.watch import BEAT_SECONDS
from penstock.schedule import Action, Costs, Op, Schedule, lower, simulate, verify
from penstock.schedule.action import NEIGHBOUR, trusted
from penstock.schedule.schedule import expect_schedule
from penstock.schedule.timing.simulate import priced_pairs
from penstock.schedule.topology import links
from penstock.tools.rehearsal.faults import PlannedFault, check_plan
from penstock.tools.rehearsal.network import STORE_LATENCY, STORE_SERVICE, Network, Store
from penstock.tools.rehearsal.rank import Notice, RehearsedRank, Setting
from penstock.tools.rehearsal.stage import plain_loop
from penstock.tools.rehearsal.virtual_time import VirtualTime
from penstock.tools.search.explore import without_collecting

MANY = 1_000_000  # actions of a program


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal.

    Attributes:
        program: The program that was run.
        makespan: The time from the first computation to the end of the last one, of the first step; 0 if nothing was
            computed.
        makespans: The same for every step in which something was computed.
        seconds: When the last rank was done, or stopped being heard of.
        notices: Which rank heard of which failure, when, and whom it named; in the order of time.
        struck: The faults that happened; one that was planned for later did not.
        hung: Ranks that neither ended nor were told to stand still.
        is_exact: Whether all losses and gradients of the steps that were completed are those of a plain loop.
        completed: How many steps each rank completed.
        order: For each rank, what it did, all steps in order, as far as that was recorded.
        store_requests: How many questions the ranks asked their store.
    """

    program: Schedule
    makespan: float
    makespans: tuple[float, ...]
    seconds: float
    notices: tuple[Notice, ...]
    struck: tuple[PlannedFault, ...]
    hung: tuple[int, ...]
    is_exact: bool
    completed: tuple[int, ...]
    order: tuple[tuple[Action, ...], ...] = field(repr=False)
    store_requests: int = 0

    @property
    def named(self) -> tuple[int, ...]:
        """The ranks that somebody named as the cause of a failure."""
        return tuple(sorted({notice.named for notice in self.notices if notice.named is not None}))


def rehearse(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    seed: int = 0,
    faults: Iterable[PlannedFault | str] = (),
    steps: int = 1,
    timeout: float = 60.0,
    jitter: float = 0.0,
    store_host: int | None = None,
    record: bool = True,
) -> Rehearsal:
    """Run the real runtime of every rank on virtual time: the executor, messages, failures and the end of each step.

    Computations take their stated time and messages theirs, in seconds. Needs the package greenlet
    (`penstock[rehearsal]`).

    Args:
        schedule: The schedule or program.
        costs: Times. By default, `F`, `I` and `W` take 1 second each and messages take no time.
        seed: Which interleaving: the order of what is due at the same moment, and the jitter.
        faults: What goes wrong, such as `"die 3 at 12.5"`; see `penstock.tools.rehearsal.faults`.
        steps: How many training steps; after a failure that leaves the links whole, ranks go on with the next step.
        timeout: As of `Pipeline`: how long a rank may be silent.
        jitter: Relative spread of the time of each computation and message.
        store_host: The rank whose process has the store of the process group. By default none has: the launcher has it.
        record: Whether to keep the order of actions; for millions of them that takes memory.
    """
    program, costs, planned = checked(schedule, costs, seed, faults, steps, timeout, jitter, store_host)
    for fault in planned:
        if fault.kind == "interrupt":
            raise UsageError(f"'{fault}': only rehearse_training has a script that Ctrl-C could reach")
    longest = max(max(map(max, costs.by_op(program.stages))), 0.0)
    limit = limit_of(program, costs, planned, steps, timeout, jitter) + longest
    time = VirtualTime(seed, -BEAT_SECONDS)
    setting = make_setting(program, costs, time, store_host, timeout, steps, jitter, seed, record)
    ranks = [RehearsedRank(rank, setting) for rank in range(program.ranks)]
    draw = random.Random(seed)
    # To look through millions of actions, which are no garbage, takes longer than to run them.
    with without_collecting() if program.columns.size > MANY else nullcontext():
        for rank in ranks:
            time.start(rank.rank, rank.live, -BEAT_SECONDS * draw.random())
        plan_faults(planned, ranks, time, program)
        try:
            time.run(lambda: not setting.unsettled, limit)
            seconds = time.now
        finally:
            time.close()
    return _outcome(program, ranks, seconds, steps, setting)


def checked(
    schedule: Schedule,
    costs: Costs | None,
    seed: int,
    faults: Iterable[PlannedFault | str],
    steps: int,
    timeout: float,
    jitter: float,
    store_host: int | None,
) -> tuple[Schedule, Costs, list[PlannedFault]]:
    """Return the program, costs and faults of a rehearsal; raise if any of what was asked for cannot be rehearsed."""
    expect_schedule(schedule, "rehearse")
    if costs is not None and not isinstance(costs, Costs):
        raise UsageError(f"costs must be a Costs, such as Costs(forward=0.2, input=0.2, weight=0.1); got {costs!r}")
    check_count("steps", steps)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed is a whole number; got {seed!r}")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise UsageError(f"timeout is a number of seconds above 0; got {timeout!r}")
    answer = STORE_LATENCY + STORE_SERVICE
    if timeout < 10 * answer:
        raise UsageError(
            f"timeout={timeout:g}: a rank asks the store ten times per timeout, and an answer takes {answer:g} s here, "
            f"so that nobody would know of anybody in time; pass at least {10 * answer:g}"
        )
    if not isinstance(jitter, (int, float)) or not 0 <= jitter < math.inf:
        raise UsageError(f"jitter is a relative spread of 0 or more, such as 0.1; got {jitter!r}")
    if isinstance(faults, str):
        raise UsageError(f"faults is a list, such as [{faults!r}]; got one text")
    costs = costs or Costs()
    if isinstance(costs.overlap, Mapping) and "transfers" not in schedule.passes:  # pairs that it does not name
        schedule = schedule.replace(priced_pairs(schedule.columns, costs)[0])
    program = schedule if "transfers" in schedule.passes else lower(schedule)
    verify(program)
    if Op.REDUCE_GRAD in program.ops or Op.UNSHARD in program.ops:
        raise UsageError("replicas and shards are not rehearsed; rehearse the schedule before reductions are added")
    if store_host is not None and not 0 <= store_host < program.ranks:
        raise UsageError(f"store_host={store_host}; there are ranks 0 to {program.ranks - 1}, or None")
    costs.check_edges(program.topology)
    return program, costs, check_plan(faults, program, steps)


def limit_of(
    program: Schedule, costs: Costs, faults: Sequence[PlannedFault], steps: int, timeout: float, jitter: float
) -> float:
    """Return when every rank has ended unless it hangs: the most that the steps take, and time to find a culprit."""
    slowest = math.prod(max(fault.factor, 1.0) for fault in faults)
    pauses = sum(fault.seconds for fault in faults if fault.kind in ("stop", "stall") and fault.seconds < math.inf)
    step = simulate(program, costs).makespan * slowest * (1 + 10 * jitter)
    return steps * (step + timeout) + pauses + 10 * timeout + 60


def make_setting(
    program: Schedule,
    costs: Costs,
    time: VirtualTime,
    store_host: int | None,
    timeout: float,
    steps: int,
    jitter: float,
    seed: int,
    record: bool,
) -> Setting:
    """Make what the ranks of a rehearsal have in common."""
    count = program.microbatches
    ways = []
    for link in links(program.placement, program.topology):
        there = link.source_rank, link.target_rank
        for way in (there, there[::-1]):  # Both directions stand in the order of a mailbox's channels.
            ways.append(max(costs.wire(link.source, target, way) for target in link.targets))
    latency = costs.hop or costs.latency
    network = Network(time, lambda source, target: latency)
    return Setting(
        program=program,
        costs=costs,
        network=network,
        store=Store(network, store_host),
        timeout=timeout,
        steps=steps,
        batch=Batch([()] * count, [{}] * count, [None] * count, [{}] * count, None, True),
        times=costs.recomputed(program.stages, program.recompute).by_op(program.stages),
        sizes=costs.scale(count),
        ways=ways,
        jitter=jitter,
        seed=seed,
        record=record,
        unsettled=set(range(program.ranks)),
    )


def plan_faults(
    faults: Sequence[PlannedFault], ranks: Sequence[RehearsedRank], time: VirtualTime, program: Schedule
) -> None:
    """Plan each fault for its time, or for its action on its rank."""
    for fault in faults:
        at = fault.at
        if isinstance(at, Action):
            owner = ranks[program.placement.rank_of(at.stage)]
            peer = at.other_end if at.op.is_transfer else None
            owner.strikes.setdefault((fault.step, at.op, at.stage, at.microbatch, peer), []).append(fault)
        else:
            assert fault.rank is not None
            owner = ranks[fault.rank]
            time.start(-1, lambda owner=owner, fault=fault: None if owner.ended else owner.strike(fault), at)  # type: ignore[misc]


def _outcome(
    program: Schedule, ranks: Sequence[RehearsedRank], seconds: float, steps: int, setting: Setting
) -> Rehearsal:
    makespans = []
    for step in range(steps):
        around = [rank.computes[step] for rank in ranks if step in rank.computes]
        if around:
            makespans.append(max(end for _, end in around) - min(begin for begin, _ in around))
    notices = sorted((notice for rank in ranks for notice in rank.notices), key=lambda each: (each.time, each.rank))
    return Rehearsal(
        program=program,
        makespan=makespans[0] if makespans else 0.0,
        makespans=tuple(makespans),
        seconds=seconds,
        notices=tuple(notices),
        struck=tuple(fault for rank in ranks for fault in rank.struck),
        hung=tuple(sorted(setting.unsettled)),
        is_exact=_is_exact(program, ranks, steps),
        completed=tuple(len(rank.done) for rank in ranks),
        order=tuple(_actions(rank) for rank in ranks),
        store_requests=setting.store.requests,
    )


def _actions(rank: RehearsedRank) -> tuple[Action, ...]:
    found = []
    for stage, op, microbatch, peer in rank.order:
        near = peer is None or peer == stage + NEIGHBOUR[op]
        found.append(trusted(stage, op, microbatch, None if near else peer))
    return tuple(found)


def _is_exact(program: Schedule, ranks: Sequence[RehearsedRank], steps: int) -> bool:
    for step in range(steps):
        done = {rank.rank: rank.done[step] for rank in ranks if step in rank.done}
        if not done:
            continue
        losses, gradients = plain_loop(program.topology, program.microbatches, step, not program.forward_only)
        for each in done.values():
            if each.losses != losses or any(gradients[stage] != sum_ for stage, sum_ in each.gradients.items()):
                return False
    return True
