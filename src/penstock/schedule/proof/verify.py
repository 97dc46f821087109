"""The proof that a schedule is right, before the first step.

First every action by itself: stage, rank, microbatch in range. Then each rank's order: every
(stage, microbatch) has one forward and one backward (or one I and one W), no action stands
before what it needs on its own rank, a stage is whole when it computes, each link's receives
are its sends in the same order. All faults of these are reported at once, with rank, position
and action; what is out of range is set aside, so that it does not hide the rest.

Last the whole, which only means something when each part is right: the ranks are run against
each other on the strictest transport with links of the kind that was asked for. Nothing is
buffered, a send ends only together with its receive, and transfers that share a stream follow each
other in the order in which the program posts them. What ends here ends on every transport whose
links are of that kind, or share less; what does not is drawn as the ring of ranks that wait for each
other.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import Fault, ScheduleError, UsageError
from penstock.rules import check_count
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.dependencies import Table, Value, stuck_at, waits_in_cells, waits_of
from penstock.schedule.events import run
from penstock.schedule.lowering.align import stuck_faults
from penstock.schedule.proof.certificate import LINKS, Certificate, certificate_of
from penstock.schedule.proof.rendezvous import rendezvous_faults
from penstock.schedule.proof.shape import crowd_fault, shape_faults
from penstock.schedule.proof.transfers import Transfers, link_faults
from penstock.schedule.repeated import repeated
from penstock.schedule.schedule import Schedule, expect_schedule
from penstock.schedule.seen import passes_seen


def verify(schedule: Schedule, steps: int = 1, links: str = "direction") -> Certificate:
    """Prove that a schedule or program is correct and cannot deadlock, or raise `ScheduleError` with every fault.

    Args:
        schedule: The schedule or program.
        steps: Number of steps that are proved back to back, where ranks go from one into the next by themselves.
        links: What has a stream of its own, in which transfers follow each other in the order of the program: each
            `"direction"` between two ranks, as in Penstock's own transports; each `"pair"` of ranks, as the
            communicators that NCCL makes by itself; each `"rank"`, as where one communicator serves all.

    Returns:
        The certificate. The schedule keeps it as `schedule.certificate`, and `save` writes it to a `.json` file.
    """
    found = faults(schedule, steps, links)
    if found:
        raise ScheduleError(found)
    certificate = schedule.__dict__["certificate"] = certificate_of(schedule, links)
    return certificate


def faults(schedule: Schedule, steps: int = 1, links: str = "direction") -> list[Fault]:
    """Find everything that is wrong with a schedule or program. An empty list is the proof that nothing is.

    Args:
        schedule: The schedule or program.
        steps: Number of steps that are proved back to back, with microbatches counted on from one to the next.
        links: What has a stream of its own: each `"direction"` between two ranks, each `"pair"`, or each `"rank"`.
    """
    expect_schedule(schedule, "verify")
    check_count("steps", steps)
    if links not in LINKS:
        raise UsageError(f"links={links!r}: choose one of {', '.join(map(repr, LINKS))}")
    found = _faults_of_step(schedule, links)
    if found or steps == 1:
        return found
    schedule = repeated(schedule, steps)  # each step by itself is right: what is left is how they meet
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    if not _is_lowered(schedule):
        return _order_faults(schedule, table)
    transfers = Transfers(schedule, table)
    return [*link_faults(schedule, transfers)] or rendezvous_faults(schedule, transfers, links)


def _is_lowered(schedule: Schedule) -> bool:
    return "transfers" in schedule.passes or any(op.is_transfer for op in schedule.ops)


def _faults_of_step(schedule: Schedule, links: str) -> list[Fault]:
    """Return what is wrong with one step."""
    found = list(shape_faults(schedule))
    if schedule.ranks != schedule.placement.ranks or crowd_fault(schedule) is not None:
        return found
    if found:
        schedule = _well_shaped(schedule, found)
    found += _completeness_faults(schedule)
    table = Table(schedule.placement, schedule.topology, schedule.microbatches)
    lowered = _is_lowered(schedule)
    transfers = Transfers(schedule, table)
    found += [*_rank_order_faults(schedule, transfers, lowered), *_sharding_faults(schedule)]
    if lowered:
        found += link_faults(schedule, transfers)
        return found or rendezvous_faults(schedule, transfers, links)
    return found or _order_faults(schedule, table)


def _order_faults(schedule: Schedule, table: Table) -> list[Fault]:
    """Check that the computes of all ranks, in their orders, can end."""
    import numpy as np

    columns = schedule.columns
    needs = waits_of(table, columns)
    outcome = run(columns.starts, np.broadcast_to(0.0, columns.size), waits_in_cells(columns, needs))
    if not outcome.stuck:
        return []
    return stuck_faults(schedule.rows, stuck_at(columns, table, needs, outcome.stuck))


def _well_shaped(schedule: Schedule, found: list[Fault]) -> Schedule:
    """Return the schedule with idle slots in place of the actions that these faults name."""
    odd = {(fault.rank, fault.position) for fault in found if fault.action is not None}
    return schedule.replace(
        (None if (rank, position) in odd else action for position, action in enumerate(row))
        for rank, row in enumerate(schedule.rows)
    )


def _completeness_faults(schedule: Schedule) -> Iterator[Fault]:
    """Check that each (stage, microbatch) has exactly one F and one B, or one I and one W."""
    import numpy as np

    columns, microbatches = schedule.columns, schedule.microbatches
    computes = np.flatnonzero(columns.op <= Op.W)
    key = columns.stage[computes].astype(np.int64) * microbatches + columns.microbatch[computes]
    counts = np.zeros((Op.W + 1, schedule.stages * microbatches), dtype=bool)
    counts[columns.op[computes], key] = True
    if len(computes) > np.count_nonzero(counts):
        _, first = np.unique(key * (Op.W + 1) + columns.op[computes], return_index=True)
        for number in np.delete(computes, first).tolist():
            yield Fault("is there twice; it must run once", *schedule.place(number))
    forwards, full, inputs, weights = counts
    if schedule.forward_only:
        odd = ~forwards | full | inputs | weights
    else:
        odd = ~forwards | np.where(full, inputs | weights, ~inputs | ~weights)
    for key in np.flatnonzero(odd).tolist():
        yield from _incomplete(schedule, *divmod(key, microbatches), *counts[:, key].tolist())


def _incomplete(
    schedule: Schedule, stage: int, microbatch: int, forward: bool, full: bool, half: bool, other: bool
) -> Iterator[Fault]:
    """Yield what is wrong with one microbatch in one stage, by which of F, B, I and W there are."""

    def fault(op: Op, text: str) -> Fault:
        return Fault(text, schedule.placement.by_stage[stage], None, trusted(stage, op, microbatch))

    halves = [f"{stage}{op}{microbatch}" for op, there in ((Op.I, half), (Op.W, other)) if there]
    if not forward:
        yield fault(Op.F, "never runs")
    if schedule.forward_only:
        for op, there in ((Op.B, full), (Op.I, half), (Op.W, other)):
            if there:
                yield fault(op, "is a backward in a forward-only schedule")
    elif full:
        if halves:
            yield fault(Op.B, f"is a full backward, yet {' and '.join(halves)} runs too")
    elif not halves:
        yield fault(Op.B, f"never runs, nor do {stage}I{microbatch} and {stage}W{microbatch}")
    elif len(halves) == 1:
        yield fault(Op.W if half else Op.I, f"never runs, but its other half {halves[0]} does")


def _rank_order_faults(schedule: Schedule, transfers: Transfers, lowered: bool) -> Iterator[Fault]:
    """Check that on its own rank nothing stands before what it needs.

    In a lowered program that includes what other ranks make: it must have been received.
    """
    import numpy as np

    table, columns = transfers.table, schedule.columns
    got, sent = transfers.receives, transfers.sends
    made_by, made = table.positions(columns, table.made)
    first = np.full(table.size, columns.size, dtype=np.int32)  # Cells in which each position's value is there first.
    np.minimum.at(first, made, columns.cell[made_by])
    np.minimum.at(first, got.positions, got.numbers)
    if not lowered:  # what comes from other ranks is for the run of all ranks to see
        away = [schedule.placement.by_stage[stage] != rank for _, stage, rank, _ in table.names]
        first[np.repeat(away, table.microbatches)] = -1
    found: list[tuple[int, Fault]] = []
    for who, position in (table.positions(columns, table.needed), (sent.numbers, sent.positions)):
        for early in np.flatnonzero(first[position] >= columns.cell[who]).tolist():
            number = int(who[early])
            found.append((number, _too_early(schedule, table, number, int(position[early]))))
    fresh = first[got.positions] >= got.numbers
    if not fresh.all():
        for number in np.setdiff1d(got.number, got.numbers[fresh]).tolist():
            found.append((number, Fault("receives what is there already", *schedule.place(number))))
    for number in transfers.strays.tolist():
        rank, place, action = schedule.place(number)
        found.append((number, Fault(_no_link(schedule, rank, action), rank, place, action)))
    return (fault for _, fault in sorted(found, key=lambda entry: entry[0]))


def _too_early(schedule: Schedule, table: Table, number: int, key: int) -> Fault:
    rank, position, action = schedule.place(number)
    value, stage, _, microbatch = table.name(key)
    cell = schedule.columns.row(rank)[position]
    for part in cell.parts() if cell is not None and cell.pair is not None else ():
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
    """Check that a stage is whole when it computes, and that its gradients are reduced once, at the end."""
    names = schedule.passes | passes_seen(schedule.ops)
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
