"""How short any schedule can be: what a search's answer is measured against.

Every bound here holds for every schedule of a chain of stages, whatever its order, with split
or full backwards. The largest of them over all ranks is the lower bound. For one rank, with m
microbatches:

work       It cannot start before the first microbatch has come through the stages before its
           first one, and then has m (F + I + W) to do, over its stages. With p equal ranks, v
           stages on each, whole-rank times F, I, W and hops of c, the last rank gives

               m (F + I + W) + (p - 1) (F / v + c)

ends       Its last F is still followed by that microbatch's way to the last stage and all
           the way back; its last I by the way back from there. So the rank's forwards alone, or
           its forwards and input backwards, plus the shortest such rest, are bounds.

fill       Before the rank's first I only F can run, and no more of them than memory holds.
           That first I cannot start before `turn`: a microbatch's way to the last stage and
           back to here. What did not fit before `turn` comes after it:

               turn + m (F + I + W) - (the F that fit into memory, and into the time until turn)

drain      When the last F starts, all but what memory holds has had its W. So between `turn`
           and the end of the last F stand the F that did not fit before `turn`, and the I and
           W that must have made room; the rest of the last microbatch's way comes after that:

               turn + (F that did not fit) + (I and W that made room) + (the last F's rest)

The last one is tight for one stage a rank: with activations held until W and a cap of p,
1F1B's order with W filled in reaches it. `heads_and_tails.py` adds what follows microbatch by
microbatch, for pipelines of up to 40,000 microbatch-stages: how memory and links pace them. For those of up to 40,
`refutation.py` then raises the bound for as long as it can show that no schedule ends by it.

For the span, the longest time from a rank's own first start to its own end, the clock starts
with the rank's first F: ways count from the rank's first stage and end there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

from penstock.errors import UsageError
from penstock.rules import check_count, is_float
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import recomputing_stages
from penstock.schedule.timing.costs import Costs, given_costs, memory_by_op
from penstock.schedule.topology import Topology
from penstock.tools.search.bounds.heads_and_tails import paced_bound
from penstock.tools.search.bounds.refutation import refuted_bound

ROUNDING = 1e-9


class NoRoom(UsageError):
    """Not even one microbatch fits into memory. `fact` is what does not, `remedy` what would help."""

    def __init__(self, fact: str, remedy: str) -> None:
        super().__init__(f"{fact}; {remedy}")
        self.fact = fact


def lower_bound(
    placement: Placement,
    microbatches: int,
    costs: Costs | None = None,
    memory: float | Sequence[float] | None = None,
    *,
    span: bool = False,
    recompute: Iterable[int] = (),
    quick: bool = False,
) -> float:
    """Return a time that no schedule with this placement can beat. Refused where memory cannot hold one microbatch.

    Args:
        placement: Which rank owns which stage.
        microbatches: Number of microbatches.
        costs: Costs per stage, as `simulate` takes them.
        memory: The cap on each rank's `peak_memory`, one number or one per rank.
        span: Whether to bound the longest span of a rank instead of the makespan.
        recompute: The stages that recompute.
        quick: Whether to leave out the refutation of small pipelines, of up to 40 microbatch-stages. It takes some
            seconds, and brings the bound of the makespan to 95 % of the optimum or more.
    """
    if not isinstance(placement, Placement):
        raise UsageError(f"the placement must be a Placement, such as Placement.loop(4); got {placement!r}")
    check_count("microbatches", microbatches)
    again = recomputing_stages(recompute, placement.stages)
    costs, caps = given_costs(costs), caps_of(memory, placement.ranks)
    costs.check_edges(Topology.chain(placement.stages))
    _check_memory(placement, costs, costs.scale(microbatches), caps, again)
    costs = _least(costs, placement.stages).recomputed(placement.stages, again)
    if costs.sizes is not None:
        bound = _sized_bound(placement, costs, costs.scale(microbatches), span)
    else:
        bound = _alike_bound(placement, microbatches, costs, caps, span)
    return bound if span or quick else refuted_bound(placement, microbatches, costs, caps, bound)


def _check_memory(
    placement: Placement, costs: Costs, scale: Sequence[float], caps: Sequence[float], again: frozenset[int]
) -> None:
    """Refuse memory that cannot be added up, and caps that do not hold one microbatch when its backward begins."""
    forward, full, _, _ = memory_by_op(costs, placement.stages, again)
    for rank, cap in enumerate(caps):
        stages = placement.stages_of(rank)
        held = sum(forward[stage][1] for stage in stages)
        if not math.isfinite(held * sum(scale)):
            what = "costs" if costs.sizes is None else "costs and sizes"
            raise UsageError(
                f"the {what} are too large to be added up: rank {rank} "
                f"may hold {len(scale)} microbatches, of up to {max(scale) * held:g} each; give them in a larger unit"
            )
        needed = max(scale) * (held + max(0.0, full[stages[-1]][0]))
        if needed > cap * (1 + ROUNDING):
            raise NoRoom(
                f"memory {cap:g} is too little for rank {rank}: one microbatch alone holds {needed:g} there",
                "give at least that much",
            )


def _alike_bound(placement: Placement, microbatches: int, costs: Costs, caps: Sequence[float], span: bool) -> float:
    ways = _Ways.of(placement, costs)
    bounds = [
        _rank_bound(placement.stages_of(rank), microbatches, costs, caps[rank], ways, span)
        for rank in range(placement.ranks)
    ]
    return max(bounds) if span else max(*bounds, paced_bound(placement, microbatches, costs, caps))


def _least(costs: Costs, stages: int) -> Costs:
    """Return the costs with every compute as short as an overlapped pair could make it."""
    if costs.overlap is None:
        return costs
    shares = costs.overlap.values() if isinstance(costs.overlap, Mapping) else [costs.overlap]
    share = min([1.0, *shares])

    def shorter(name: str) -> list[float]:
        return [time * share for time in costs.per_stage(name, stages)]

    return replace(costs, forward=shorter("forward"), input=shorter("input"), weight=shorter("weight"))


def _sized_bound(placement: Placement, costs: Costs, scale: Sequence[float], span: bool) -> float:
    """Bound microbatches that differ: a rank's work after the smallest has come to it; the largest one's way alone.

    The time on links is left out of both.
    """
    forward, full, _, _ = costs.by_op(placement.stages)
    least, most = min(scale), max(scale)
    bounds = [0.0]
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        head = 0.0 if span else least * sum(forward[: stages[0]])
        bounds.append(head + sum(scale) * sum(forward[stage] + full[stage] for stage in stages))
    if not span:
        bounds.append(most * sum(forward) + most * sum(costs.by_op(placement.stages)[2]))
    return max(bounds)


def caps_of(memory: float | Sequence[float] | None, ranks: int) -> tuple[float, ...]:
    """Return one cap for each rank."""
    if memory is None:
        return (math.inf,) * ranks
    listed = isinstance(memory, Iterable) and not isinstance(memory, (str, Mapping))
    caps = tuple(cast("Iterable[float]", memory)) if listed else (cast("float", memory),) * ranks
    if len(caps) != ranks:
        raise UsageError(
            f"memory has {len(caps)} numbers for {ranks} ranks; give one per rank, or a single one for all"
        )
    for cap in caps:
        if not (is_float(cap) and cap > 0):
            raise UsageError(f"memory must be a number above 0, got {cap!r}; leave it out for no cap")
    return caps


class _Ways(NamedTuple):
    """How long one microbatch is under way, when it never waits. By stage."""

    # Counted from the start of the first stage's F; rests, from the end of I until all that must follow is done.
    forward_starts: list[float]
    input_starts: list[float]
    input_rests: list[float]

    @classmethod
    def of(cls, placement: Placement, costs: Costs) -> _Ways:
        home, stages = placement.by_stage, placement.stages
        forward, _, backward, weight = costs.by_op(stages)
        pairs = list(pairwise(home))
        hops = [_hop(costs, stage, (here, there)) for stage, (here, there) in enumerate(pairs)]
        backs = [_hop(costs, stage, (there, here)) for stage, (here, there) in enumerate(pairs)]
        forward_starts = [0.0, *accumulate(forward[stage] + hops[stage] for stage in range(stages - 1))]
        turn = forward_starts[-1] + forward[-1]
        steps = (backward[stage + 1] + backs[stage] for stage in reversed(range(stages - 1)))
        back = list(accumulate(steps, initial=turn))
        rests: list[float] = []
        for stage in range(stages):
            before = backs[stage - 1] + backward[stage - 1] + rests[stage - 1] if stage else 0.0
            rests.append(max(weight[stage], before))
        return cls(forward_starts, back[::-1], rests)


def _hop(costs: Costs, stage: int, way: tuple[int, int]) -> float:
    """Return the time from a stage to the next one; nothing where both are on one rank."""
    return 0.0 if way[0] == way[1] else sum(costs.wire(stage, stage + 1, way))


def _rank_bound(stages: Sequence[int], count: int, costs: Costs, cap: float, ways: _Ways, span: bool) -> float:
    total = len(ways.forward_starts)
    forward, _, backward, weight = ([times[stage] for stage in stages] for times in costs.by_op(total))
    first, last = stages[0], stages[-1]
    head = ways.forward_starts[first]
    turn = ways.input_starts[last]
    if span:  # What must follow is on this rank.
        home_end = ways.input_starts[first] + backward[0] + weight[0]
        input_rests = [home_end - ways.input_starts[stage] - time for stage, time in zip(stages, backward, strict=True)]
    else:
        input_rests = [ways.input_rests[stage] for stage in stages]
    round_trips = [
        ways.input_starts[stage] + back + rest - ways.forward_starts[stage] - ahead
        for stage, back, rest, ahead in zip(stages, backward, input_rests, forward, strict=True)
    ]
    forwards, inputs, weights = (count * sum(times) for times in (forward, backward, weight))
    bounds = [
        head + forwards + inputs + weights,
        head + forwards + inputs + min(input_rests),
        head + forwards + min(round_trips),
    ]
    activation, held = ([costs.per_stage(name, total)[stage] for stage in stages] for name in ("activation", "held"))
    early = min(_most_forwards(forward, activation, count, cap), turn - head)
    bounds.append(turn + forwards + inputs + weights - early)
    room = _least_room(backward, weight, activation, held, count, cap)
    if room > 0:
        bounds.append(turn + forwards - early + room + min(round_trips))
    return max(bounds) - (head if span else 0.0)


def _most_forwards(forward: Sequence[float], activation: Sequence[float], count: int, cap: float) -> float:
    """Return the most time that a rank's forwards can take before memory is full."""
    cap *= 1 + ROUNDING
    time = 0.0
    whole = len(set(activation)) == 1  # Else parts of a forward are allowed: a bound all the same.
    for length, size in sorted(zip(forward, activation, strict=True), key=lambda pair: _ratio(*pair), reverse=True):
        fitting = count if size * count <= cap else cap / size
        fitting = math.floor(fitting) if whole else fitting
        time += fitting * length
        cap -= fitting * size
    return time


def _least_room(
    backward: Sequence[float],
    weight: Sequence[float],
    activation: Sequence[float],
    held: Sequence[float],
    count: int,
    cap: float,
) -> float:
    """Return the least time that I and W take which must be done before the last F fits into memory."""
    over = count * sum(activation) - cap * (1 + ROUNDING)
    if over <= 0:
        return 0.0
    whole = len(set(activation)) == 1 and list(held) == list(activation)
    steps: list[tuple[float, float]] = []  # (time, memory given back), for one microbatch
    for i, w, size, kept in zip(backward, weight, activation, held, strict=True):
        if kept >= size or _ratio(i, size - kept) >= _ratio(i + w, size):
            steps.append((i + w, size))
        else:
            steps += [(i, size - kept), (w, kept)]
    time = 0.0
    for length, size in sorted((step for step in steps if step[1] > 0), key=lambda step: _ratio(*step)):
        wanted = over / size
        taken = min(count, math.ceil(wanted - ROUNDING) if whole else wanted)
        time += taken * length
        over -= taken * size
        if over <= 0:
            break
    return time


def _ratio(length: float, size: float) -> float:
    return length / size if size else math.inf
