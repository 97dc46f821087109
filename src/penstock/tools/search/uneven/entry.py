"""What `search` does when it is told that layers, ranks, links or microbatches differ."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.errors import UsageError
from penstock.rules import is_float
from penstock.schedule.action import Op
from penstock.schedule.builders import TRAINING
from penstock.schedule.builders.problem import ROUNDING, stage_costs
from penstock.schedule.lowering.align import align
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.simulate import simulate
from penstock.schedule.topology import Topology
from penstock.tools.search.bounds.lower_bound import NoRoom, lower_bound
from penstock.tools.search.budget import Budget
from penstock.tools.search.found import Found, Tried
from penstock.tools.search.request import Request
from penstock.tools.search.space import placements_for, recompute_choices
from penstock.tools.search.uneven.instance import Instance
from penstock.tools.search.uneven.joint import HABITS, Answer, Joint, drawn
from penstock.tools.search.uneven.layers import Layer, Model, layers_of
from penstock.tools.search.uneven.microbatches import shorter, within
from penstock.tools.search.uneven.ready_list import Habit, Outcome, run
from penstock.tools.search.uneven.sequence import sequences
from penstock.tools.search.unsplit import built_for

__all__ = ["FoundCut", "search_cut", "search_stages", "search_uneven"]


@dataclass(frozen=True)
class FoundCut(Found):
    """The best schedule found, and the cut of the layers that it is for.

    Attributes:
        schedule: The schedule.
        costs: The costs of its stages, as `simulate` takes them.
        objective: What was minimised: `"makespan"` or `"span"`.
        value: The value of the objective.
        lower_bound: A value that no allowed schedule and cut can beat.
        tried: What was tried.
        seconds: How long the search took.
        counts: The number of layers per stage: what `Pipeline(balance=[...])` takes.
        shares: Per rank, its share of the output layer; empty if that is not split. Its stages then follow those of the
            layers, and the last stage joins them.
    """

    counts: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def with_microbatches(self, microbatches: int) -> Schedule:
        """A schedule of the same stages on the same ranks, in the same memory, for another number of microbatches.

        Args:
            microbatches: Number of microbatches.
        """
        if microbatches == self.schedule.microbatches:
            return self.schedule
        placement, topology = self.schedule.placement, self.schedule.topology
        caps = [max(self.timeline.peak_memory)] * placement.ranks
        instance = Instance(placement, topology, microbatches, self.costs, caps, self.schedule.recompute)
        found = [run(instance, range(microbatches), habit) for habit in HABITS]
        best = min((each for each in found if each is not None), key=lambda outcome: outcome.value)
        return instance.schedule(best.orders)

    @property
    def chosen(self) -> Tried:
        """The entry of `tried` that the schedule comes from: the best."""
        return self.tried[0]


def search_uneven(request: Request, budget: Budget) -> Found:
    """`search_report` for layers to cut, or microbatches that differ."""
    if request.objective != "makespan":
        raise UsageError(
            f"objective={request.objective!r} is for costs by rank or stage; with layers or sizes it is the makespan"
        )
    request.priced.scale(request.microbatches)
    return _search_sizes(request, budget) if request.layers is None else search_cut(request, budget)


def search_cut(request: Request, budget: Budget, stages: int | None = None) -> FoundCut:
    """The cut of the request's layers, into exactly so many stages if that is given, their ranks and their order."""
    joint = Joint(_model(request), request, budget, stages)
    answer = joint.search(joint.shapes())
    schedule, costs = joint.schedule(answer), answer.shape.costs()
    # a rank that waited to see whether something better comes need not: the same order may be shorter than its run
    answer = replace(answer, outcome=Outcome(simulate(schedule, costs).makespan, answer.outcome.orders))
    return FoundCut(
        schedule,
        costs,
        "makespan",
        answer.value,
        joint.floor,
        _tried([answer, *joint.answers], joint.floor, budget.orders),
        budget.seconds,
        answer.shape.counts,
        answer.shape.shares,
    )


def search_stages(
    stages: int, ranks: int, microbatches: int, layers: Sequence[Layer], speeds: Sequence[float] | None, effort: int
) -> FoundCut:
    """The cut into exactly so many stages, their ranks and order, within 1F1B's memory; the same on every machine.

    1F1B's memory is that of as many microbatches as there are ranks, of what one rank has of the model on average.
    """
    cap = sum(layer.activation for layer in layers) or math.inf
    request = Request(
        ranks,
        microbatches,
        memory=cap,
        stages_per_rank=-(-stages // ranks),
        layers=layers,
        speeds=speeds,
        effort=effort,
    )
    return search_cut(request, request.budget, stages)


def _model(request: Request) -> Model:
    ranks, costs, layers = request.ranks, request.priced, layers_of(request.layers or ())
    speeds = (1.0,) * ranks if request.speeds is None else tuple(request.speeds)
    if len(speeds) != ranks:
        raise UsageError(f"speeds has {len(speeds)} numbers for {ranks} ranks; give one for each")
    if not all(is_float(speed) and 0 < speed < math.inf for speed in speeds):
        raise UsageError(f"a speed is a number above 0, such as 0.5 for half as fast; got {list(speeds)}")
    for skip in request.skips:
        ends = tuple(skip) if isinstance(skip, Sequence) else ()
        if len(ends) != 2 or not all(type(end) is int for end in ends) or not 0 <= ends[0] < ends[1] < len(layers):
            raise UsageError(f"a skip is (from layer, to a later layer), of {len(layers)} layers; got {skip!r}")
    sums = [sum(layer.time for layer in layers) / min(speeds), sum(layer.activation + layer.state for layer in layers)]
    if not all(math.isfinite(request.microbatches * each) for each in sums):
        raise UsageError("times or memory of the layers are too large to be added up; give them in a larger unit")
    if request.vocabulary and len(layers) < 2:
        raise UsageError("vocabulary=True splits the last layer, but there is only one layer")
    return Model(layers, speeds, costs, tuple(request.skips), request.caps, request.recompute)


def _refuse_without_layers(request: Request) -> None:
    given = {"speeds": request.speeds is not None, "skips": bool(request.skips), "vocabulary": request.vocabulary}
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} is about layers that are still to be cut; give layers= as well")


def _tried(answers: Sequence[Answer], floor: float, orders: int) -> tuple[Tried, ...]:
    """The best of each number of stages and kind of placement, the best of all first."""
    found: dict[tuple[int, str, tuple[int, ...]], Tried] = {}
    for answer in sorted(answers, key=lambda answer: answer.value):
        kind = f"{answer.shape.kind}, output split" if answer.shape.shares else answer.shape.kind
        entry = Tried(answer.shape.stages_per_rank, kind, answer.value, floor, orders, tuple(sorted(answer.recompute)))
        found.setdefault(entry.key, entry)
    return tuple(found.values())


def _search_sizes(request: Request, budget: Budget) -> Found:
    """Microbatches that differ, with costs by rank or stage: every placement, under more and more habits."""
    _refuse_without_layers(request)
    caps, microbatches = request.caps, request.microbatches
    generator = random.Random(request.seed)
    tries, lack = list[_Try](), math.inf
    for kind, placement in placements_for(request):
        each = stage_costs(request.priced, placement.stages_per_rank)
        for again in recompute_choices(request, placement):
            instance = Instance(placement, Topology.chain(placement.stages), microbatches, each, caps, again)
            lack = min(lack, instance.lack)
            with suppress(NoRoom):  # then another choice of stages that recompute may have it
                bound = lower_bound(placement, microbatches, each, caps, recompute=again, quick=True)
                tries.append(_Try(kind, instance, bound))
    if any(each_try.bound == math.inf for each_try in tries):
        raise UsageError("the costs and sizes are too large to be added up; give them in a larger unit")
    for each_try in tries:
        for habit in () if each_try.instance.lack else HABITS:
            each_try.run(habit, budget)
    shortest = min((each_try.value for each_try in tries), default=math.inf)
    for each_try in tries:
        each_try.run_families(budget, shortest)
        shortest = min(shortest, each_try.value)
    # where half a backward needs more room than a whole one, a family may fit all the same
    tries = [each_try for each_try in tries if each_try.schedule is not None or not each_try.instance.lack]
    while tries and budget.limit and budget.left > 0:
        leaders = sorted(tries, key=lambda each_try: each_try.value)
        leaders[min(int(generator.expovariate(0.7)), len(leaders) - 1)].run(drawn(generator), budget)
    best = min(tries, key=lambda each_try: each_try.value, default=None)
    if best is None or best.schedule is None:
        raise NoRoom(
            f"memory is too little for the largest microbatch alone: a rank lacks at least {lack:g}"
            if lack
            else f"no order was found in memory {min(caps):g}, though each microbatch alone has room",
            f"give more{'' if request.recompute else ', recompute=True,'} or smaller microbatches",
        )
    bound = min(each_try.bound for each_try in tries)
    tried = tuple(each_try.tried for each_try in tries)
    return Found(best.schedule, best.instance.costs, "makespan", best.value, bound, tried, budget.seconds)


class _Try:
    """The best order so far of one placement."""

    def __init__(self, kind: str, instance: Instance, bound: float) -> None:
        self.kind, self.instance, self.bound = kind, instance, bound
        self.schedule: Schedule | None = None
        self.value = math.inf  # when the last rank is done
        self.runs = 0

    @property
    def tried(self) -> Tried:
        """What came of it."""
        size, again = self.instance.placement.stages_per_rank, tuple(sorted(self.instance.recompute))
        return Tried(size, self.kind, self.value, self.bound, self.runs, again)

    def run_families(self, budget: Budget, shortest: float) -> None:
        """Try every family's schedule for this placement, as it is and in an order made for the sizes.

        That is what `order_microbatches` finds in the family's own memory, as far as it beats the shortest known.
        """
        each, costs = self.instance, self.instance.costs
        searched = set[float]()
        for built in built_for(each.placement, each.microbatches, TRAINING, pairs=costs.overlap is not None):
            schedule = align(built.replace(recompute=each.recompute, name="auto"))
            peak = min(max(self._offer(schedule, budget)), max(each.caps))
            shortest = min(shortest, self.value)
            if (schedule.columns.op == Op.B).any() or peak not in searched:  # split ones differ in their memory only
                searched.add(peak)
                found = shorter(schedule, costs, [min(peak, cap) for cap in each.caps], shortest * (1 - ROUNDING))
                if found is not None:
                    self._offer(found, budget)

    def run(self, habit: Habit, budget: Budget) -> None:
        """Try one habit with every sequence."""
        for sequence in sequences(self.instance.scale):
            found = run(self.instance, sequence, habit, self.value * (1 - ROUNDING))
            if found is None:
                self._count(budget)
            else:
                self._offer(self.instance.schedule(found.orders), budget)

    def _offer(self, schedule: Schedule, budget: Budget) -> tuple[float, ...]:
        """Keep the schedule if it fits and is the best so far; its peak memory comes back."""
        self._count(budget)
        timeline = simulate(schedule, self.instance.costs)
        if timeline.makespan < self.value and within(timeline.peak_memory, self.instance.caps):
            self.schedule, self.value = schedule, timeline.makespan
        return timeline.peak_memory

    def _count(self, budget: Budget) -> None:
        self.runs += 1
        budget.orders += 1
