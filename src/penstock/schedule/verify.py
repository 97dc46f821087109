"""The proof that a schedule is right, before the first step.

First every action by itself: stage, rank, microbatch in range. Then each rank's order: every
(stage, microbatch) has one forward and one backward (or one I and one W), no action stands
before what it needs on its own rank, a stage is whole when it computes, each link's receives
are its sends in the same order. All faults of these are reported at once, with rank, position
and action; what is out of range is set aside, so that it does not hide the rest.

Last the whole, which only means something when each part is right: the ranks are run against
each other on the strictest transport there is. Nothing is buffered, each directed link keeps
its order, a send ends only when its receive is posted. What ends here ends on every
transport; what does not is drawn as the ring of ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import Fault, ScheduleError
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.align import stuck_faults
from penstock.schedule.dependencies import Stuck, Table, Value, walk
from penstock.schedule.rendezvous import rendezvous_faults
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.seen import passes_seen
from penstock.schedule.transfers import Transfers, link_faults

__all__ = ["faults", "verify"]


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError with every fault; return when the schedule is proved right."""
    found = faults(schedule)
    if found:
        raise ScheduleError(found)


def faults(schedule: Schedule) -> list[Fault]:
    """Everything that is wrong with a schedule or program; an empty list is the proof."""
    expect_schedule(schedule, "verify")
    found = list(schedule.shape_faults())
    if schedule.ranks != schedule.placement.ranks or schedule.crowd_fault() is not None:
        return found
    if found:
        schedule = _well_shaped(schedule, found)
    found += _completeness_faults(schedule)
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    transfers = Transfers(schedule, table)
    lowered = "transfers" in schedule.passes or _has_transfers(schedule)
    found += [*_rank_order_faults(schedule, transfers, lowered), *_sharding_faults(schedule)]
    if lowered:
        found += link_faults(schedule, transfers)
        return found or rendezvous_faults(schedule, transfers)
    if found:
        return found
    stuck: list[Stuck] = []
    for _ in walk(schedule.rows, table, stuck):
        pass
    return stuck_faults(schedule.rows, stuck) if stuck else []


def _well_shaped(schedule: Schedule, found: list[Fault]) -> Schedule:
    """The schedule with idle slots in place of the actions that these faults name."""
    odd = {(fault.rank, fault.position) for fault in found if fault.action is not None}
    return schedule.replace(
        (None if (rank, position) in odd else action for position, action in enumerate(row))
        for rank, row in enumerate(schedule.rows)
    )


def _has_transfers(schedule: Schedule) -> bool:
    first, last = Op.SEND_F, Op.RECV_B
    return any(action is not None and first <= action[1] <= last for row in schedule.rows for action in row)


def _completeness_faults(schedule: Schedule) -> Iterator[Fault]:
    """Each (stage, microbatch) has exactly one F and one B, or one I and one W."""
    microbatches, stages = schedule.microbatches, schedule.stages
    size = stages * microbatches
    counts = [bytearray(size) for _ in range(Op.W + 1)]
    last_compute, first_pair = Op.W, Op.OVERLAP_F_B
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            if entry is None or last_compute < entry[1] < first_pair:
                continue
            for action in (entry,) if entry[4] is None else entry[4]:
                stage, op, microbatch = action[0], action[1], action[2]
                key = stage * microbatches + microbatch
                if counts[op][key]:
                    yield Fault("is there twice; it must run once", rank, position, action)
                counts[op][key] = 1
    backward_due = not schedule.forward_only
    forwards, full, inputs, weights = counts
    if all(forwards) and not backward_due and not any(map(any, counts[1:])):
        return
    home = schedule.placement.by_stage
    for key in range(size):
        stage, microbatch = divmod(key, microbatches)
        rank = home[stage]
        if not forwards[key]:
            yield Fault("never runs", rank, None, trusted(stage, Op.F, microbatch))
        halves = (inputs[key], weights[key])
        if not backward_due:
            for op in (Op.B, Op.I, Op.W):
                if counts[op][key]:
                    yield Fault("is a backward in a forward-only schedule", rank, None, trusted(stage, op, microbatch))
        elif full[key] and any(halves):
            extra = " and ".join(f"{stage}{op}{microbatch}" for op, there in zip("IW", halves, strict=True) if there)
            yield Fault(f"is a full backward, yet {extra} runs too", rank, None, trusted(stage, Op.B, microbatch))
        elif not full[key] and not all(halves):
            if halves == (0, 0):
                wanted = trusted(stage, Op.B, microbatch)
                yield Fault(f"never runs, nor do {stage}I{microbatch} and {stage}W{microbatch}", rank, None, wanted)
            else:
                missing = Op.W if halves[0] else Op.I
                yield Fault(
                    f"never runs, but its other half {stage}{'I' if missing is Op.W else 'W'}{microbatch} does",
                    rank,
                    None,
                    trusted(stage, missing, microbatch),
                )


def _rank_order_faults(schedule: Schedule, transfers: Transfers, lowered: bool) -> Iterator[Fault]:
    """On its own rank nothing stands before what it needs.

    In a lowered program that includes what other ranks make: it must have been received.
    """
    table = transfers.table
    needed, made, usual = table.needed, table.made, transfers.usual
    here = bytearray(table.size)
    if not lowered:  # what comes from other ranks is the walk's to check
        for number, (_, stage, rank, _) in enumerate(table.names):
            if schedule.placement.by_stage[stage] != rank:
                first = number * table.microbatches
                here[first : first + table.microbatches] = b"\1" * table.microbatches
    last_compute, last_transfer, receive_f, receive_b = Op.W, Op.RECV_B, Op.RECV_F, Op.RECV_B
    for rank, row in enumerate(schedule.rows):
        for position, entry in enumerate(row):
            if entry is None:
                continue
            stage, op, microbatch, peer, pair = entry
            if op <= last_compute or pair is not None:
                parts = (entry,) if pair is None else pair
                for action in parts:
                    stage, op, microbatch, _, _ = action
                    for base in needed[op][stage]:
                        if not here[base + microbatch]:
                            yield _too_early(schedule, table, rank, position, action, base + microbatch, entry)
                for stage, op, microbatch, _, _ in parts:
                    for base in made[op][stage]:
                        here[base + microbatch] = 1
            elif op <= last_transfer:
                move = usual[op][stage] if peer is None else transfers.move(entry)
                if move is None:
                    yield Fault(_no_link(schedule, rank, entry), rank, position, entry)
                elif op is receive_f or op is receive_b:
                    if all(here[base + microbatch] for base in move[3]):
                        yield Fault("receives what is there already", rank, position, entry)
                    for base in move[3]:
                        here[base + microbatch] = 1
                else:
                    for base in move[2]:
                        if not here[base + microbatch]:
                            yield _too_early(schedule, table, rank, position, entry, base + microbatch)


def _too_early(
    schedule: Schedule, table: Table, rank: int, position: int, action: Action, key: int, entry: Action | None = None
) -> Fault:
    value, stage, _, microbatch = table.name(key)
    for part in entry.parts() if entry is not None else ():
        if part.microbatch == microbatch and key in {base + microbatch for base in table.made[part.op][part.stage]}:
            why = f"needs what {part} makes, and the parts of a pair may run at the same time; write them apart"
            return Fault(why, rank, position, action)
    maker = f"{stage}F{microbatch}" if value is Value.OUTPUT else f"{stage}B{microbatch} or {stage}I{microbatch}"
    home = schedule.placement.by_stage[stage]
    what = maker if home == rank else f"the receive of {maker} from rank {home}"
    return Fault(f"stands before {what}, which it needs", rank, position, action)


def _no_link(schedule: Schedule, rank: int, action: Action) -> str:
    far = action.other_end
    if not 0 <= far < schedule.stages:
        return f"there is no stage {far} at its other end"
    if schedule.placement.rank_of(far) == rank:
        return f"stages {action.stage} and {far} both live on rank {rank}: a hand-over, with no transfer"
    return f"no value goes between stages {action.stage} and {far} in this topology"


def _sharding_faults(schedule: Schedule) -> Iterator[Fault]:
    """A stage is whole when it computes; each stage's gradients are reduced once, at the end."""
    names = schedule.passes | passes_seen(schedule.rows)
    if not names & {"shards", "reductions"}:
        return
    for rank, row in enumerate(schedule.rows):
        state = _StageStates(rank, sharded="shards" in names)
        for position, entry in enumerate(row):
            if entry is not None and not entry.op.is_transfer:
                for action in entry.parts():
                    yield from state.run(position, action)
        for stage, position in state.whole.items():
            yield Fault(f"stage {stage} is left whole: {stage}RESHARD is missing", rank, position, row[position])
        if "reductions" in names and not schedule.forward_only:
            for stage in schedule.placement.stages_of(rank):
                if stage not in state.reduced:
                    yield Fault("never runs", rank, None, trusted(stage, Op.REDUCE_GRAD))


class _StageStates:
    """Which of a rank's stages are whole, and which have been reduced."""

    def __init__(self, rank: int, sharded: bool) -> None:
        self.rank, self.sharded = rank, sharded
        self.whole: dict[int, int] = {}
        self.reduced: set[int] = set()

    def run(self, position: int, action: Action) -> Iterator[Fault]:
        """Take one action; yield what is wrong with it here."""
        stage, op = action.stage, action.op
        if op is Op.UNSHARD:
            if stage in self.whole:
                yield Fault(f"stage {stage} is whole already", self.rank, position, action)
            self.whole[stage] = position
        elif op is Op.RESHARD:
            if self.whole.pop(stage, None) is None:
                yield Fault(f"stage {stage} is not whole here", self.rank, position, action)
        elif self.sharded and stage not in self.whole:
            yield Fault(f"stage {stage} is sharded here: {stage}UNSHARD must come first", self.rank, position, action)
        if op is Op.REDUCE_GRAD:
            if stage in self.reduced:
                yield Fault("is there twice; gradients are reduced once per step", self.rank, position, action)
            self.reduced.add(stage)
        elif op in (Op.B, Op.W) and stage in self.reduced:
            yield Fault(f"comes after {stage}REDUCE_GRAD, which must be last", self.rank, position, action)
