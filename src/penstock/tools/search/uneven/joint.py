"""Cut, placement, order and recomputation in one search, for layers, ranks and links that differ.

1. Rows of ranks (`rows`), each with the cuts that a bound likes (`cutting`): a few dozen shapes.
2. Every shape is run with a few habits (`ready_list`), with few microbatches first where there are many. That tells the
   good ones from the rest.
3. The best ones lend and borrow layers, one at a time, as long as the run gets shorter.
4. What is left of the budget goes to the orders of the best shapes: chains to the search that costs by stage have
   (`search/hunt.py`), which begins with the orders that were found here; others to more habits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.errors import UsageError
from penstock.schedule.builders.problem import ROUNDING, Problem
from penstock.schedule.schedule import Schedule
from penstock.tools.search.bounds.lower_bound import NoRoom
from penstock.tools.search.budget import Budget
from penstock.tools.search.effort import Effort
from penstock.tools.search.hunt import Hunt
from penstock.tools.search.orders.evaluate import Candidate, complete, price
from penstock.tools.search.request import Request
from penstock.tools.search.space import recompute_choices
from penstock.tools.search.uneven.cutting import cut_layers, neighbours, split_output
from penstock.tools.search.uneven.floor import floor_of
from penstock.tools.search.uneven.instance import Instance
from penstock.tools.search.uneven.layers import Model, Shape
from penstock.tools.search.uneven.ready_list import Habit, Outcome, run
from penstock.tools.search.uneven.rows import rows_to_try
from penstock.tools.search.uneven.sequence import sequences

__all__ = ["HABITS", "Answer", "Joint", "drawn"]

HABITS = (
    Habit(overrun=0.9),
    Habit(),
    Habit(patience=0.5, overrun=0.6),
    Habit(turn="input", input="old", overrun=0.9),
    Habit(turn="forward"),
)
FINALISTS = 4
FIRST = 2  # habits that every shape is run with
POLISHED = 4  # shapes whose orders are searched together
PROMISING = {2: 0, 4: 1, 3: 2, 1: 3}  # stages per rank: what comes first where there is no time for all
HALF = 0.3  # of what is left: to tell which two shapes are worth the rest
SHARES = (0.3, 0.5)  # of the budget, after which screening and moving layers end
CAPPED = (0.2, 0.3)  # the same where memory is short: there the orders need more of it


@dataclass(frozen=True)
class Answer:
    """A shape, the stages that recompute in it, and the best orders so far."""

    shape: Shape
    recompute: frozenset[int]
    habit: Habit
    outcome: Outcome
    full: bool  # with all microbatches

    @property
    def value(self) -> float:
        """When the last rank is done."""
        return self.outcome.value


class Joint:
    """One search for the request whose layers and ranks `model` has."""

    def __init__(self, model: Model, request: Request, budget: Budget, stages: int | None = None) -> None:
        self.model, self.request, self.budget, self.stages = model, request, budget, stages
        self.microbatches, self.memory = microbatches, memory = request.microbatches, request.caps
        self.progress, self.generator = request.progress, random.Random(request.seed)
        self.sizes = model.base.scale(microbatches)
        self.floor = 0.0
        self.answers: list[Answer] = []
        few = 3 * model.ranks
        self.short = few if microbatches > 4 * model.ranks and model.base.sizes is None else microbatches
        self.shares = CAPPED if min(memory) < math.inf else SHARES
        self.begun = 0.0  # what was spent before the first order
        self.least = math.inf  # memory that the shape that fits best lacks

    # -- shapes

    def shapes(self) -> list[Shape]:
        """Every row of ranks, cut in a few ways."""
        found: dict[tuple[object, ...], Shape] = {}
        work, vocabulary, stages = sum(self.sizes), self.request.vocabulary, self.stages
        for kind, row in rows_to_try(self.model, self.request.sizes, self.request.kinds, stages):
            for split in (True, False) if vocabulary else (False,):
                for even in (True, False):
                    shape = cut_layers(self.model, row, work, kind, split, even, full=stages is not None)
                    if shape is not None and stages in (None, len(shape.counts)):
                        found.setdefault((shape.by_stage, shape.counts, split), shape)
        if not found:
            raise UsageError(
                f"{len(self.model.layers)} layers cannot be cut for {self.model.ranks} ranks with at least one each; "
                "use fewer ranks, or give finer layers"
            )
        self.floor = floor_of(self.model, self.microbatches, vocabulary)
        return sorted(found.values(), key=lambda shape: PROMISING.get(shape.stages_per_rank, len(PROMISING)))

    def instance(self, shape: Shape, recompute: frozenset[int], microbatches: int) -> Instance:
        """What a shape is to run."""
        costs = shape.costs()
        caps = shape.caps(self.memory)
        return Instance(shape.placement, shape.topology, microbatches, costs, caps, recompute)

    def price(self, shape: Shape, recompute: frozenset[int], habits: Iterable[Habit], count: int) -> Answer | None:
        """The best of some habits with `count` microbatches; None where none fits into memory."""
        instance = self.instance(shape, recompute, count)
        self.least = min(self.least, instance.lack)
        if instance.lack:
            return None
        best: Answer | None = None
        for sequence in sequences(self.sizes[:count]):
            for habit in habits:
                self.budget.orders += 1
                outcome = run(instance, sequence, habit)
                if outcome is not None and (best is None or outcome.value < best.value):
                    best = Answer(shape, recompute, habit, outcome, count == self.microbatches)
        return best

    # -- the search

    def search(self, shapes: list[Shape]) -> Answer:
        """The best answer that the budget allows."""
        self.begun = self.budget.spent
        for number, shape in enumerate(shapes):
            if number >= FINALISTS and self._beyond(self.shares[0] / 2):
                break
            for again in recompute_choices(self.request, shape.placement):
                self._take(self.price(shape, again, HABITS[:FIRST], self.short))
        for answer in self.answers[: max(FINALISTS, len(self.answers) // 3)]:
            if not self._beyond(self.shares[0]):
                self._take(self.price(answer.shape, answer.recompute, HABITS[FIRST:], self.short))
        if not self.answers:
            raise NoRoom(
                f"memory is too little for any cut: a rank lacks at least {self.least:g} for one microbatch beside its "
                "layers' state",
                f"give more{'' if self.request.recompute else ', recompute=True,'} or more ranks",
            )
        self._move_layers()
        self._lengthen()
        return self._polish()

    def _beyond(self, share: float) -> bool:
        return self.budget.limit > 0 and self.budget.spent > self._until(share)

    def _until(self, share: float) -> float:
        """Where in the budget a share of what there was after cutting ends."""
        return self.begun + share * (self.budget.limit - self.begun)

    def _take(self, answer: Answer | None) -> None:
        if answer is not None:
            self.answers.append(answer)
            self.answers.sort(key=lambda answer: answer.value)
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None and self.short == self.microbatches:
            self.progress(self.budget.spent, self.answers[0].value, self.floor)

    def _move_layers(self) -> None:
        """Let the best shapes lend and borrow a layer, for as long as it helps and the budget lasts."""
        screened, moved = self.shares
        for place in range(min(FINALISTS, len(self.answers))):
            best = self.answers[place]
            moves = self._moves(best)
            limit = self._until(screened + (moved - screened) * (place + 1) / FINALISTS)
            while moves and self.budget.limit and self.budget.spent < limit:
                found = self.price(moves.pop(), best.recompute, (best.habit,), self.short)
                if found is not None and found.value < best.value * (1 - ROUNDING):
                    best = found
                    moves = self._moves(best)
            if best is not self.answers[place]:
                self.answers.append(best)
        self.answers.sort(key=lambda answer: answer.value)

    def _moves(self, answer: Answer) -> list[Shape]:
        shape = answer.shape
        found = [_with(shape, counts) for counts in neighbours(shape)]
        loads = sorted((max(loads_of(other)), number) for number, other in enumerate(found))
        kept = [found[number] for load, number in loads if load <= max(loads_of(shape)) * (1 + ROUNDING)]
        self.generator.shuffle(kept)
        return kept

    def _lengthen(self) -> None:
        """The best shapes with all microbatches, where they were run with few."""
        if self.short == self.microbatches:
            return
        chosen = self._leaders()[:POLISHED]
        self.answers = []
        for answer in chosen:
            habits = dict.fromkeys((answer.habit, *HABITS[:2]))  # in this order: of equals, always the same one wins
            self._take(self.price(answer.shape, answer.recompute, habits, self.microbatches))
        self.short = self.microbatches

    def _polish(self) -> Answer:
        """Better orders for the best shapes."""
        best = self.answers[0]
        left = self._leaders()
        while left and self.budget.limit and self.budget.left > 0 and best.value > self.floor * (1 + ROUNDING):
            finalists, left = left[:POLISHED], left[POLISHED:]
            chains = [each for each in finalists if each.shape.topology.is_chain and self.model.base.sizes is None]
            found = self._hunt(chains) if len(chains) == len(finalists) else self._draw(finalists)
            best = found if found.value < best.value else best
        return best

    def _leaders(self) -> list[Answer]:
        """The answers that differ, the best of each kind of placement first: a good order is not yet a good pattern."""
        by_shape: dict[tuple[object, ...], Answer] = {}
        for answer in self.answers:
            by_shape.setdefault((answer.shape.by_stage, answer.shape.counts, answer.recompute), answer)
        firsts: dict[tuple[object, ...], Answer] = {}
        for answer in by_shape.values():
            firsts.setdefault((answer.shape.kind, answer.shape.stages_per_rank, bool(answer.shape.shares)), answer)
        rest = [answer for answer in by_shape.values() if answer not in firsts.values()]
        return [*firsts.values(), *rest]

    def _draw(self, answers: list[Answer]) -> Answer:
        """More habits, for stages that are no chain, until the budget is spent."""
        best = answers[0]
        while self.budget.left > 0 and best.value > self.floor * (1 + ROUNDING):
            answer = answers[min(int(self.generator.expovariate(1.0)), len(answers) - 1)]
            found = self.price(answer.shape, answer.recompute, (drawn(self.generator),), self.microbatches)
            if found is not None and found.value < best.value:
                best = found
                self._take(best)
        return best

    def _hunt(self, answers: list[Answer]) -> Answer:
        hunts, origin = [], {}
        for answer in answers:
            shape = answer.shape
            problem = Problem(
                shape.placement, self.microbatches, shape.costs(), shape.caps(self.memory), recompute=answer.recompute
            )
            hunt = Hunt(problem, shape.kind, self.generator, self.budget)
            score = price(problem, answer.outcome.orders, None)
            if score is not None:
                hunt.best.append(Candidate(score, answer.outcome.orders, None))
            hunts.append(hunt)
            origin[id(hunt)] = answer
        limit = self.budget.limit
        self.budget.limit = self.budget.spent + self.budget.left * HALF
        Effort(hunts, self.budget, self.progress).run(self.generator)
        self.budget.limit = limit
        hunts = sorted(hunts, key=lambda hunt: hunt.value)[:2]
        winner = Effort(hunts, self.budget, self.progress).run(self.generator)
        orders = complete(winner.problem, winner.best[0])
        return replace(origin[id(winner)], outcome=Outcome(winner.value, orders))

    def schedule(self, answer: Answer) -> Schedule:
        """The answer as a schedule."""
        instance = self.instance(answer.shape, answer.recompute, self.microbatches)
        return instance.schedule(answer.outcome.orders)


def _with(shape: Shape, counts: tuple[int, ...]) -> Shape:
    changed = replace(shape, counts=counts)
    return replace(changed, shares=split_output(shape.model, loads_of(changed))) if shape.shares else changed


def loads_of(shape: Shape) -> list[float]:
    """By rank, the time of one microbatch in the stages that are not of the split output layer."""
    loads, first = [0.0] * shape.model.ranks, 0
    for rank, count in zip(shape.by_stage, shape.counts, strict=True):
        work = sum(layer.time for layer in shape.model.layers[first : first + count])
        loads[rank] += work / shape.model.speeds[rank]
        first += count
    return loads


def drawn(generator: random.Random) -> Habit:
    """A habit at random."""
    return Habit(
        generator.choice(("alternate", "alternate", "forward", "input")),
        generator.choice(("deep", "deep", "old", "shallow")),
        generator.choice(("deep", "deep", "old", "shallow")),
        generator.choice((0.0, 0.25, 0.5, 1.0)),
        generator.random() * 0.9,
        generator.choice((math.inf, math.inf, float(generator.randint(1, 12)))),
    )
