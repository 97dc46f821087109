"""The search on one placement: what is known, then rules, and on small pipelines changes to the best orders.

First every builder's own order, so that the answer is never worse than one of them, and the same with W filled in anew
for the true costs. Then orders made by a few rules that did well on many costs. From then on each step tries another
rule, most often one that differs from the best so far in one or two points; where an order is priced in no time, most
steps are a neighbourhood search from one of the best orders instead.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from penstock.schedule.action import Action, Op
from penstock.schedule.builders import FAMILIES, TRAINING, Family, build
from penstock.schedule.builders.dispatch import Rule, dispatch
from penstock.schedule.builders.filling import NOTHING, Candidate, Overrun, Score, complete, fill, price
from penstock.schedule.builders.problem import LARGE, ROUNDING, Orders, Problem
from penstock.schedule.lowering.align import align
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.simulate import simulate
from penstock.schedule.timing.steady import steady_state
from penstock.tools.search.bounds.lower_bound import lower_bound
from penstock.tools.search.bounds.steady_bound import steady_bound
from penstock.tools.search.budget import Budget
from penstock.tools.search.found import Tried
from penstock.tools.search.microbatches import reordered, sequences
from penstock.tools.search.neighbours import improve
from penstock.tools.search.portfolio import IN_TURN, OVERRUNS, drawn, first_rules, overruns_for

KEPT = 4  # best orders
FAR = 1.05  # Other places for W do not make up for an order that is so far behind the best.
MARGIN = 1.005  # a large placement must promise to gain this much
SMALL = 500  # computes


class PlacementSearch:
    """The best orders of one placement so far."""

    def __init__(
        self, problem: Problem, kind: str, generator: random.Random, budget: Budget, bound: float = 0.0
    ) -> None:
        self.problem, self.kind, self.generator, self.budget = problem, kind, generator, budget
        self.bound = max(bound, _bound(problem))
        self.best: list[Candidate] = []
        self.built: tuple[float, Schedule | None] = (math.inf, None)  # the best with full backwards
        self.rule: Rule | None = None  # the one that did best
        self.rule_score = NOTHING
        self.orders = 0  # how many were priced
        short = problem.alike and problem.microbatches > 4 * problem.ranks
        self.rehearsal = problem.but(microbatches=3 * problem.ranks) if short else None

    @property
    def value(self) -> float:
        """The objective of the best order so far."""
        return min(self.best[0].score[0] if self.best else math.inf, self.built[0])

    @property
    def small(self) -> bool:
        """Whether an order is priced in no time, so that many can be."""
        return 3 * self.problem.size <= SMALL

    @property
    def large(self) -> bool:
        """Whether one order takes long enough that not all can be tried."""
        return 3 * self.problem.size > LARGE

    @property
    def rule_takes(self) -> float:
        """About what a rule takes of the budget."""
        return self.budget.for_a_rule(3 * self.problem.size)

    @property
    def tried(self) -> Tried:
        """What came of it."""
        per_rank, again = self.problem.placement.stages_per_rank, tuple(sorted(self.problem.recompute))
        return Tried(per_rank, self.kind, self.value, self.bound, self.orders, again)

    def schedule(self) -> Schedule:
        """Return the best as a schedule."""
        value, built = self.built
        if built is not None and (not self.best or value < self.best[0].score[0] * (1 - ROUNDING)):
            return built
        return self.problem.schedule(complete(self.problem, self.best[0]), "auto")

    def can_beat(self, value: float) -> bool:
        """Return whether there may be a better order here, on a large pipeline one that is worth looking for."""
        return self.bound * (MARGIN if self.large else 1.0) < value * (1 - ROUNDING)

    # -- what is known

    def builders(self, best: Callable[[], float]) -> Iterator[None]:
        """Try every builder's order for this placement, as it is and with W filled in anew.

        On a large pipeline the family whose first microbatches do best comes first, and those are left out whose first
        microbatches say that they are no match for `best`.
        """
        if not self.problem.alike:
            self._try_in_order_of_sizes()
            yield
        elif self._values_full_backwards():
            for built in built_for(self.problem, [name for name in TRAINING if FAMILIES[name].has_full_backwards]):
                self.offer_schedule(built)
            yield
        if self.problem.lack or not self.problem.alike:
            return
        families = [*self._families()]
        estimates = dict.fromkeys(families, -math.inf)
        if self.large:
            estimates = {family: self._estimate(family) for family in families}
        for family in sorted(families, key=estimates.__getitem__):
            if estimates[family] < best():
                if self.large:
                    self._refill(self._draft(family, self.problem))
                else:
                    self.begin(self.problem.numbers([*self._rows(family, self.problem)]))
                yield

    def _families(self) -> Iterator[Family]:
        """Yield the families for this placement, each order once; the zero-bubble ones, which do best, come first."""
        per_rank = self.problem.placement.stages_per_rank
        for family in reversed(FAMILIES.values()):
            same_as_other = family.as_one_stage if per_rank == 1 else family.layout == "block"
            if family.trains and not same_as_other and _is_for(family, self.problem.placement):
                yield family

    def begin(self, orders: Orders) -> None:
        """Try a complete order as it is, and with W filled in anew."""
        self.offer(orders, None)
        self._refill([[x for x in order if x < 2 * self.problem.size] for order in orders], (*OVERRUNS, IN_TURN))

    def _rows(self, family: Family, problem: Problem, **options: bool) -> Iterable[list[Action]]:
        return family.rows(problem.ranks, problem.microbatches, problem.placement.stages_per_rank, **options)

    def _draft(self, family: Family, problem: Problem) -> Orders:
        """Return a family's order of F and I."""
        options = {"weights": False} if family.drafts else {}
        rows = problem.numbers([*self._rows(family, problem, **options)])
        return [[x for x in order if x < 2 * problem.size] for order in rows]

    def _estimate(self, family: Family) -> float:
        """Return what it would take, from what it takes with fewer microbatches; infinite where these do not fit.

        Each microbatch more is more work for the busiest rank, and a family's fill and drain do not shrink. Those that
        promise no cap are tried with one microbatch more than memory holds, since what they hold may grow with all.
        """
        problem, ranks = self.problem, self.problem.ranks
        held = max(problem.least_memory(rank) / cap for rank, cap in enumerate(problem.caps))
        most = int(1 / held) + 1 if held else ranks
        microbatches = max(ranks, most) if family.cap is None and most <= 2 * ranks + 1 else ranks
        if microbatches >= problem.microbatches:
            return 0.0
        short = problem.but(microbatches=microbatches)
        score = price(short, self._draft(family, short), OVERRUNS[0])
        return math.inf if score is None else score[0] + (problem.microbatches - microbatches) * problem.busiest

    def _values_full_backwards(self) -> bool:
        """Return whether orders with full backwards may be better than split ones, which else are never slower.

        Where a stage holds more between I and W than before them (`held` above `activation`: the gradients of its
        outputs stay too), a full backward fits into memory that its two halves do not; and where `overlap` says what a
        pair of a forward and a full backward takes, pairs save time.
        """
        costs, stages = self.problem.costs, self.problem.stages
        sizes = zip(costs.per_stage("held", stages), costs.per_stage("activation", stages), strict=True)
        return costs.overlap is not None or any(held > activation for held, activation in sizes)

    def _try_in_order_of_sizes(self) -> None:
        """Try every builder's schedule with microbatches that differ as it is, and as `order_microbatches` has it.

        Of that, what takes less than the best known in the memory of the schedule itself.
        """
        problem, searched = self.problem, set[float]()
        for built in built_for(problem, TRAINING):
            peak = min(max(self.offer_schedule(built)), max(problem.caps))
            if (built.columns.op == Op.B).any() or peak not in searched:  # split ones differ in their memory only
                searched.add(peak)
                caps = [min(peak, cap) for cap in problem.caps]
                found = reordered(built, problem.costs, caps, self.value * (1 - ROUNDING))
                if found is not None:
                    self.offer_schedule(found)

    def offer_schedule(self, schedule: Schedule) -> tuple[float, ...]:
        """Try a schedule as it is, with its full backwards and pairs; return its peak memory."""
        problem = self.problem
        self._count(1)
        timeline = simulate(schedule, problem.costs)
        if all(peak <= cap for peak, cap in zip(timeline.peak_memory, problem.caps, strict=True)):
            if problem.objective == "steady":
                value = steady_state(schedule, problem.costs).period
            elif problem.objective == "span":
                value = max(row[-1].end - row[0].start for row in timeline.by_rank)
            else:
                value = timeline.makespan
            self.built = min(self.built, (value, schedule), key=lambda each: each[0])
        return timeline.peak_memory

    def offer(self, orders: Orders, overrun: Overrun | None) -> Score:
        """Price an order and keep it if it is good; without `overrun` it is complete."""
        self._count(1)
        if self.large and overrun is not None:  # It would take long to fill it in again at the end.
            filled = fill(self.problem, orders, overrun)
            self._keep(filled)
            return filled.score
        score = price(self.problem, orders, overrun)
        if score is None:
            return NOTHING
        self._keep(Candidate(score, orders, overrun))
        return score

    def _none(self) -> Score:
        self._count(1)
        return NOTHING

    def _count(self, orders: int) -> None:
        self.orders += orders
        self.budget.orders += orders

    def _keep(self, found: Candidate) -> None:
        if found.score < NOTHING and all(found.score != other.score for other in self.best):
            self.best = sorted([*self.best, found], key=lambda candidate: candidate.score)[:KEPT]

    def _refill(self, orders: Orders, overruns: tuple[Overrun, ...] = OVERRUNS) -> Score:
        """Fill in W in several ways; in one only where that takes long, is far behind or finds no room, as with all."""
        best = NOTHING
        for overrun in overruns[:1] if self.large else overruns:
            best = min(best, self.offer(orders, overrun))
            if best == NOTHING or (best[0] > FAR * self.value and not self.small):
                break
        return best

    # -- what is made

    def rules(self) -> Iterator[Rule]:
        """Try the rules to begin with; each is yielded when it has been tried."""
        for rule in () if self.problem.lack else first_rules(self.problem):
            self.try_rule(rule)
            yield rule

    def try_rule(self, rule: Rule) -> None:
        """Make an order by a rule; of many microbatches only when it does well on fewer, which takes less time."""
        overruns, score = overruns_for(rule), NOTHING
        if self.rehearsal is None:
            for sequence in sequences(self.problem.scale):
                orders = made(self.problem, rule, sequence)
                score = min(score, self._refill(orders, overruns) if orders else self._none())
        else:
            trial = made(self.rehearsal, rule)
            self._count(len(overruns))
            if trial is not None:
                score = min(price(self.rehearsal, trial, overrun) or NOTHING for overrun in overruns)
                if score <= self.rule_score and (orders := made(self.problem, rule)) is not None:
                    self._refill(orders, overruns)
        if score <= self.rule_score:
            self.rule, self.rule_score = rule, score

    def step(self) -> None:
        """Draw a rule, or on a small pipeline most often change one of the best orders."""
        if self.best and self.small and self.generator.random() < 0.9:
            self._change()
            return
        like = self.rule if self.generator.random() < 0.7 else None
        self.try_rule(drawn(self.problem, like, self.generator))

    def _change(self) -> None:
        """Search around one of the best orders or a new one, with its W filled in or in their places."""
        chosen = self.best[min(int(self.generator.expovariate(1.0)), len(self.best) - 1)]
        if self.generator.random() < 0.5:
            orders = made(self.problem, drawn(self.problem, None, self.generator))
            if orders is not None:
                chosen = Candidate(NOTHING, orders, self.generator.choice(OVERRUNS))
        if chosen.overrun is not None and self.generator.random() < 0.3:
            chosen = Candidate(chosen.score, complete(self.problem, chosen), None)
        tries = max(10, min(1000, LARGE // self.problem.size))
        before = self.budget.orders
        self._keep(improve(self.problem, chosen, tries, self.budget, self.generator))
        self.orders += self.budget.orders - before


def _bound(problem: Problem) -> float:
    """Return a value that no order can beat; 0 where stages are no chain."""
    if not problem.topology.is_chain:
        return 0.0
    facts = (problem.placement, problem.microbatches, problem.costs, problem.memory)
    bound = lower_bound(*facts, span=problem.objective != "makespan", recompute=problem.recompute, quick=True)
    return max(bound, steady_bound(problem)) if problem.objective == "steady" else bound


def made(problem: Problem, rule: Rule, sequence: Sequence[int] | None = None) -> Orders | None:
    """Return the order of F and I that a rule makes; None where memory does not let it end."""
    run = dispatch(problem, rule, sequence)
    return run and [[x for x in order if x < 2 * problem.size] for order in run.orders]


def built_for(problem: Problem, names: Iterable[str]) -> Iterator[Schedule]:
    """Yield the named families' schedules for a placement; of interleaved-1f1b also the one with pairs."""
    ranks, per_rank = problem.ranks, problem.placement.stages_per_rank
    for name in names:
        if _is_for(FAMILIES[name], problem.placement):
            pairs = problem.costs.overlap is not None and name == "interleaved-1f1b"
            for paired in (False, True) if pairs else (False,):
                built = build(name, ranks, problem.microbatches, per_rank, overlap_b_f=paired)
                yield align(built.replace(recompute=problem.recompute, name="auto"))


def _is_for(family: Family, placement: Placement) -> bool:
    per_rank = placement.stages_per_rank
    return (family.layout != "v" or per_rank == 2) and family.placed(placement.ranks, per_rank) == placement
