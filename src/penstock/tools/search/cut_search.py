"""Cut, placement, order and recomputation in one search, for layers, ranks and links that differ.

1. Rows of ranks (`rows`), each with the cuts that a bound likes (`cutting`): a few dozen shapes.
2. Every shape is run under a few rules, with few microbatches first where there are many. That tells the good ones from
   the rest.
3. The best ones lend and borrow layers, one at a time, as long as the run gets shorter.
4. What is left of the budget goes to the orders of the best shapes (`explore`), beginning with those found here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.errors import UsageError
from penstock.rules import is_float
from penstock.schedule.builders.dispatch import Rule, Run, dispatch
from penstock.schedule.builders.problem import ROUNDING, Problem
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.simulate import simulate
from penstock.tools.search.bounds.cut_bound import cut_bound
from penstock.tools.search.bounds.lower_bound import NoRoom
from penstock.tools.search.cutting import cut_layers, neighbours
from penstock.tools.search.explore import explore
from penstock.tools.search.found import Found, Tried
from penstock.tools.search.layers import Layer, Model, Shape, layers_of
from penstock.tools.search.microbatches import TRUE, sequences
from penstock.tools.search.placement_search import PlacementSearch
from penstock.tools.search.placements import recompute_choices
from penstock.tools.search.request import Request
from penstock.tools.search.rows import rows_to_try

RULES = (
    TRUE,
    replace(TRUE, overrun=0.3),
    replace(TRUE, patience=0.5, overrun=0.6),
    replace(TRUE, turn="input", input="old"),
    replace(TRUE, turn="forward", overrun=0.3),
)
FIRST = 2  # rules that every shape is run under
FINALISTS = 4  # shapes that move layers, and whose orders are searched
PROMISING = {2: 0, 4: 1, 3: 2, 1: 3}  # stages per rank: what comes first where there is no time for all
# Shares of the budget after which screening and moving layers end; where memory is short, orders need more of it.
SHARES, CAPPED = (0.3, 0.5), (0.2, 0.3)


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
        """Return a schedule of the same stages on the same ranks, in the same memory, for other microbatches.

        Args:
            microbatches: Number of microbatches.
        """
        if microbatches == self.schedule.microbatches:
            return self.schedule
        placement, caps = self.schedule.placement, [max(self.timeline.peak_memory)] * self.schedule.ranks
        same = {"topology": self.schedule.topology, "recompute": self.schedule.recompute}
        problem = Problem(placement, microbatches, self.costs, caps, **same)  # type: ignore[arg-type]
        found = [run for rule in RULES if (run := dispatch(problem, rule)) is not None]
        return problem.schedule(min(found, key=lambda run: run.end).orders, "auto")

    @property
    def chosen(self) -> Tried:
        """The entry of `tried` that the schedule comes from: the best."""
        return self.tried[0]


@dataclass(frozen=True)
class Answer:
    """A shape, the stages that recompute in it, and the best order so far."""

    shape: Shape
    recompute: frozenset[int]
    rule: Rule
    run: Run

    @property
    def value(self) -> float:
        """When the last rank is done."""
        return self.run.end

    @property
    def kind(self) -> str:
        """The kind of its placement."""
        return f"{self.shape.kind}, output split" if self.shape.shares else self.shape.kind


def search_stages(
    stages: int, ranks: int, microbatches: int, layers: Sequence[Layer], speeds: Sequence[float] | None, effort: int
) -> FoundCut:
    """Find the cut into exactly so many stages, their ranks and order, within 1F1B's memory.

    1F1B's memory is that of as many microbatches as there are ranks, of what one rank has of the model on average. The
    answer is the same on every machine.
    """
    cap = sum(layer.activation for layer in layers) or math.inf
    per_rank = -(-stages // ranks)
    request = Request(ranks, microbatches, None, cap, per_rank, layers=layers, speeds=speeds, effort=effort)
    return search_cut(request, stages)


def search_cut(request: Request, stages: int | None = None) -> FoundCut:
    """Find a cut of the request's layers, into exactly so many stages if that is given, their ranks and their order."""
    search = _CutSearch(_model(request), request, stages)
    answer, schedule, value = search.run()
    tried: dict[tuple[int, str, tuple[int, ...]], Tried] = {}
    for each in sorted([answer, *search.answers], key=lambda each: each.value):
        facts = (value if each is answer else each.value, search.bound, search.budget.orders)
        entry = Tried(each.shape.stages_per_rank, each.kind, *facts, tuple(sorted(each.recompute)))
        tried.setdefault(entry.key, entry)
    return FoundCut(
        schedule,
        answer.shape.costs(),
        "makespan",
        value,
        search.bound,
        tuple(tried.values()),
        search.budget.seconds,
        answer.shape.counts,
        answer.shape.shares,
    )


def _model(request: Request) -> Model:
    ranks, costs, layers = request.ranks, request.priced, layers_of(request.layers or ())
    costs.scale(request.microbatches)
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


class _CutSearch:
    """One search for the request whose layers and ranks `model` has."""

    def __init__(self, model: Model, request: Request, stages: int | None) -> None:
        self.model, self.request, self.stages, self.budget = model, request, stages, request.budget
        self.generator = random.Random(request.seed)
        self.sizes = model.base.scale(request.microbatches)
        self.bound = 0.0
        self.answers: list[Answer] = []
        few = request.microbatches > 4 * model.ranks and model.base.sizes is None
        self.short = 3 * model.ranks if few else request.microbatches
        self.shares = CAPPED if min(request.caps) < math.inf else SHARES
        self.begun = 0.0  # what was spent before the first order
        self.least = math.inf  # memory that the shape that fits best lacks

    def run(self) -> tuple[Answer, Schedule, float]:
        """Return the best shape that the budget allows, its best schedule, and when that ends."""
        shapes = self._shapes()
        self.begun = self.budget.spent
        for number, shape in enumerate(shapes):
            if number >= FINALISTS and self._beyond(self.shares[0] / 2):
                break
            for again in recompute_choices(self.request, shape.placement):
                self._take(self._trial(shape, again, RULES[:FIRST], self.short))
        for answer in self.answers[: max(FINALISTS, len(self.answers) // 3)]:
            if not self._beyond(self.shares[0]):
                self._take(self._trial(answer.shape, answer.recompute, RULES[FIRST:], self.short))
        if not self.answers:
            raise NoRoom(
                f"memory is too little for any cut: a rank lacks at least {self.least:g} for one microbatch beside its "
                "layers' state",
                f"give more{'' if self.request.recompute else ', recompute=True,'} or more ranks",
            )
        self._move_layers()
        self._lengthen()
        return self._search_orders()

    def _shapes(self) -> list[Shape]:
        """Cut every row of ranks in a few ways."""
        request, model, stages = self.request, self.model, self.stages
        found: dict[tuple[object, ...], Shape] = {}
        for kind, row in rows_to_try(model, request.sizes, request.kinds, stages):
            for split in (True, False) if request.vocabulary else (False,):
                for even in (True, False):
                    shape = cut_layers(model, row, sum(self.sizes), kind, split, even, full=stages is not None)
                    if shape is not None and stages in (None, len(shape.counts)):
                        found.setdefault((shape.by_stage, shape.counts, split), shape)
        if not found:
            raise UsageError(
                f"{len(model.layers)} layers cannot be cut for {model.ranks} ranks with at least one each; "
                "use fewer ranks, or give finer layers"
            )
        self.bound = cut_bound(model, request.microbatches, request.vocabulary)
        return sorted(found.values(), key=lambda shape: PROMISING.get(shape.stages_per_rank, len(PROMISING)))

    def _problem(self, shape: Shape, recompute: frozenset[int], count: int) -> Problem:
        caps = shape.caps(self.request.caps)
        return Problem(shape.placement, count, shape.costs(), caps, topology=shape.topology, recompute=recompute)

    def _trial(self, shape: Shape, again: frozenset[int], rules: Iterable[Rule], count: int) -> Answer | None:
        """Return the best of some rules with `count` microbatches; None where none fits into memory."""
        problem = self._problem(shape, again, count)
        self.least = min(self.least, problem.lack)
        best: Answer | None = None
        for sequence in () if problem.lack else sequences(self.sizes[:count]):
            for rule in rules:
                self.budget.orders += 1
                run = dispatch(problem, rule, sequence)
                if run is not None and (best is None or run.end < best.value):
                    best = Answer(shape, again, rule, run)
        return best

    def _beyond(self, share: float) -> bool:
        return self.budget.limit > 0 and self.budget.spent > self._until(share)

    def _until(self, share: float) -> float:
        """Return where in the budget a share of what there was after cutting ends."""
        return self.begun + share * (self.budget.limit - self.begun)

    def _take(self, answer: Answer | None) -> None:
        if answer is not None:
            self.answers.append(answer)
            self.answers.sort(key=lambda answer: answer.value)
            if self.request.progress is not None and self.short == self.request.microbatches:
                self.request.progress(self.budget.spent, self.answers[0].value, self.bound)

    def _move_layers(self) -> None:
        """Let the best shapes lend and borrow a layer, for as long as it helps and the budget lasts."""
        screened, moved = self.shares
        for place in range(min(FINALISTS, len(self.answers))):
            best = self.answers[place]
            moves = self._moves(best.shape)
            limit = self._until(screened + (moved - screened) * (place + 1) / FINALISTS)
            while moves and self.budget.limit and self.budget.spent < limit:
                found = self._trial(moves.pop(), best.recompute, (best.rule,), self.short)
                if found is not None and found.value < best.value * (1 - ROUNDING):
                    best, moves = found, self._moves(found.shape)
            if best is not self.answers[place]:
                self.answers.append(best)
        self.answers.sort(key=lambda answer: answer.value)

    def _moves(self, shape: Shape) -> list[Shape]:
        """Return the shapes that differ by one layer and have no larger load on any rank, in any order."""
        most = max(shape.loads()) * (1 + ROUNDING)
        found = sorted(neighbours(shape), key=lambda each: max(each.loads()))
        found = [each for each in found if max(each.loads()) <= most]
        self.generator.shuffle(found)
        return found

    def _lengthen(self) -> None:
        """Run the best shapes with all microbatches, where they were run with few."""
        if self.short < self.request.microbatches:
            chosen, self.answers, self.short = self._leaders()[:FINALISTS], [], self.request.microbatches
            for answer in chosen:
                rules = dict.fromkeys((answer.rule, *RULES[:2]))  # The order decides among equals.
                self._take(self._trial(answer.shape, answer.recompute, rules, self.short))

    def _leaders(self) -> list[Answer]:
        """Return the answers that differ, the best of each kind of placement first."""
        by_shape: dict[tuple[object, ...], Answer] = {}
        for answer in self.answers:
            by_shape.setdefault((answer.shape.by_stage, answer.shape.counts, answer.recompute), answer)
        firsts = dict[tuple[object, ...], Answer]()
        for answer in by_shape.values():
            firsts.setdefault((answer.kind, answer.shape.stages_per_rank), answer)
        rest = [answer for answer in by_shape.values() if answer not in firsts.values()]
        return [*firsts.values(), *rest]

    def _search_orders(self) -> tuple[Answer, Schedule, float]:
        """Return the best after a search for better orders of the best shapes."""
        best = self.answers[0]
        problem = self._problem(best.shape, best.recompute, self.request.microbatches)
        schedule = problem.schedule(best.run.orders, "auto")
        if self.budget.limit and self.budget.left > 0 and best.value > self.bound * (1 + ROUNDING):
            searches = list[PlacementSearch]()
            finalists = self._leaders()[:FINALISTS]
            for answer in finalists:
                problem = self._problem(answer.shape, answer.recompute, self.request.microbatches)
                searches.append(PlacementSearch(problem, answer.kind, self.generator, self.budget, self.bound))
                searches[-1].offer(answer.run.orders, None)
            winner = explore(searches, self.budget, self.generator, self.request.progress)
            if winner.value < best.value:
                best, schedule = finalists[searches.index(winner)], winner.schedule()
        # a rank that waited to see whether something better comes need not: the same order may be shorter than its run
        return best, schedule, simulate(schedule, best.shape.costs()).makespan
