"""The cut whose most loaded rank is lightest: a sweep over the ranks, for any placement of stages.

A rank's load is a sum over its stages, which may stand far apart (loop, V, any map). So the sweep goes rank by rank,
not stage by stage: it places all boundaries of a rank's stages at once, and its load is known. What the ranks that are
left need to know of those before them is where the boundaries between the two stand, and nothing else:

    one stage per rank   0 | 1 2 3        after rank 0: one boundary
    V                    0 | 1 1 | 0      two
    loop of two rounds   0 | 1 | 0 | 1    three

Of all ways to place the boundaries so far that agree on these, one is kept: the best. That is dynamic programming, and
exact. What cannot fit under the limit any more, because the work that is left exceeds the room that is left, is
dropped: just above the optimum little else remains. A sweep has a budget of steps. Large problems with many stages per
rank spend it, and go on with those cuts that have the most work behind them; the answer says whether a complete sweep
has found nothing better.

Among cuts that are equally good, a last sweep finds the one that the fewest bytes cross, then the evenest. Where that
spends its budget, boundaries are moved a few at a time, or all of them by a little.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.model.balance.problem import ROUNDING, Ends, PartitionProblem

STEPS = 600_000  # Of a sweep over everything: less than a second.
LOCAL_STEPS = 20_000  # Of one that moves boundaries near where they are.
MANY = 1000  # cuts so far: of more, some may not be followed
BETTER = 1 - 3 * ROUNDING
# Shares of the way from what no cut can undercut to the best known: short ways are quick.
TRIES = (1 / 64, 1 / 16, 1 / 4, 1.0)

# By boundary: how far it may move from where it is; None: anywhere.
Radius = Sequence[int | None]


def lightest(problem: PartitionProblem, slack: float = 0.0) -> tuple[Ends, bool]:
    """Return the best cut found, and whether its largest load is proved to be the least.

    Loads within `slack` of the best count as equal, and bytes decide.
    """
    sweep = _Sweep(problem)
    best, exact = _settle(sweep, _start(problem))
    limit = problem.largest(best) * (1 + slack)
    found, complete = sweep.run(limit, STEPS, by_bytes=True)
    if found is None or not complete:
        found = _fewer_bytes(sweep, best if found is None else min(best, found, key=problem.bytes), limit)
    return found, exact


def _start(problem: PartitionProblem) -> Ends:
    """Choose a cut to begin with: where ranks have several stages, the best one if each stage had a rank to itself."""
    count = problem.stages
    if problem.single:
        return [*range(count), problem.atoms]
    speeds = tuple(problem.speeds[rank] for rank in problem.ranks)
    return lightest(replace(problem, ranks=tuple(range(count)), speeds=speeds))[0]


def _settle(sweep: _Sweep, best: Ends) -> tuple[Ends, bool]:
    """Sweep over everything, with limits close to what cannot be at first, until nothing better is found."""
    problem, refuted = sweep.problem, sweep.problem.floor
    tries: Sequence[float] = TRIES
    while (high := problem.largest(best)) > problem.floor * (1 + ROUNDING):
        for share in tries:
            limit = min(refuted + share * (high - refuted), high * BETTER)
            found, complete = sweep.run(limit, STEPS)
            if found is not None:
                break
            refuted = limit if complete else refuted
        if found is None or complete:
            return (best if found is None else found), complete
        best, tries = found, TRIES[-1:]
    return best, True


def _fewer_bytes(sweep: _Sweep, best: Ends, limit: float) -> Ends:
    """Move boundaries near where they are, until that saves no bytes."""
    problem, before = sweep.problem, float("inf")
    while problem.bytes(best) < before:
        before = problem.bytes(best)
        for radius in _neighbourhoods(problem):
            found, _ = sweep.run(limit, LOCAL_STEPS, best, radius, by_bytes=True)
            best = best if found is None else min(best, found, key=problem.bytes)
    return best


def _neighbourhoods(problem: PartitionProblem) -> Iterator[Radius]:
    """Yield all boundaries, by one atom; then as many neighbours as there are ranks, anywhere, the others fixed."""
    boundaries = range(problem.stages + 1)
    yield [1] * len(boundaries)
    for first in boundaries[1:-1]:
        yield [None if first <= each < first + len(problem.speeds) else 0 for each in boundaries]


@dataclass(frozen=True)
class _Choice:
    """A boundary that a rank's turn places."""

    boundary: int
    below: int  # the nearest boundaries that have a place by then
    above: int
    ends: bool  # one of the rank's stages ends here
    begins: bool  # one begins here, whose end has a place already


@dataclass(frozen=True)
class _Turn:
    """What one rank adds to the cuts of the ranks before it."""

    rank: int
    before: tuple[int, ...]  # the boundaries between these ranks' stages and others'
    closed: tuple[int, ...]  # Its stages that have both ends already.
    choices: tuple[_Choice, ...]
    after: tuple[int, ...]


def _turns(ranks: Sequence[int]) -> Iterator[_Turn]:
    stages = len(ranks)
    placed, passed = {0, stages}, set[int]()
    before: tuple[int, ...] = ()
    for rank in dict.fromkeys(ranks):
        mine = {stage for stage in range(stages) if ranks[stage] == rank}
        closed = tuple(stage for stage in sorted(mine) if {stage, stage + 1} <= placed)
        known, choices = set(placed), []
        for boundary in sorted({edge for stage in mine for edge in (stage, stage + 1)} - placed):
            below, above = max(each for each in known if each < boundary), min(e for e in placed if e > boundary)
            begins = boundary in mine and boundary + 1 in placed
            choices.append(_Choice(boundary, below, above, boundary - 1 in mine, begins))
            known.add(boundary)
        placed, passed = known, passed | mine
        after = tuple(each for each in sorted(placed - {0, stages}) if not {each - 1, each} <= passed)
        yield _Turn(rank, before, closed, tuple(choices), after)
        before = after


@dataclass(frozen=True)
class _Partial:
    """The best cut of the ranks so far, of those with the same boundaries to the others."""

    cost: tuple[float, float]
    left: float  # the least that the atoms of other ranks can weigh, at speed 1
    placed: tuple[int, ...] = ()  # Places of this turn's choices.
    earlier: _Partial | None = None


class _Sweep:
    """Dynamic programming over the ranks of one problem: each run finds the best cut within a limit."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        self._turns = list(_turns(problem.ranks))
        self._at: Ends = [0] * problem.stages + [problem.atoms]
        self._steps = 0

    def run(
        self, limit: float, steps: int, near: Ends | None = None, radius: Radius = (), *, by_bytes: bool = False
    ) -> tuple[Ends | None, bool]:
        """Return the lightest cut within `limit`, or the one that the fewest bytes cross; and whether all were looked
        at.
        """
        problem = self.problem
        self._limit, self._by_bytes = limit * (1 + ROUNDING), by_bytes
        # With one boundary, steps are few.
        left, complete = steps * problem.stages if problem.single else steps, True
        self._low, self._high = [0] * (problem.stages + 1), [problem.atoms] * (problem.stages + 1)
        for boundary, reach in enumerate(radius):
            if near is not None and reach is not None:
                self._low[boundary], self._high[boundary] = near[boundary] - reach, near[boundary] + reach
        rooms = [self._limit * problem.speeds[turn.rank] for turn in self._turns]
        states: dict[tuple[int, ...], _Partial] = {(): _Partial((0.0, 0.0), problem.least[-1])}
        for number, turn in enumerate(self._turns):
            self._later = sum(rooms[number + 1 :]) + ROUNDING * problem.least[-1]
            self._steps = share = left // (len(self._turns) - number)
            states = self._grow(turn, states)
            left, complete = left - share + max(self._steps, 0), complete and self._steps > 0
        return (self._ends(states[()]) if states else None), complete

    def _ends(self, partial: _Partial) -> Ends:
        ends = [0] * self.problem.stages + [self.problem.atoms]
        for turn in reversed(self._turns):
            for choice, place in zip(turn.choices, partial.placed, strict=True):
                ends[choice.boundary] = place
            assert partial.earlier is not None
            partial = partial.earlier
        return ends

    def _grow(self, turn: _Turn, states: dict[tuple[int, ...], _Partial]) -> dict[tuple[int, ...], _Partial]:
        """Add a rank: every way to place its boundaries, after every cut of the ranks before it."""
        sums, least, at = self.problem.sums, self.problem.least, self._at
        self._grown: dict[tuple[int, ...], _Partial] = {}
        order = list(states.items())
        if len(order) > MANY:
            order.sort(key=lambda state: state[1].left)
        for positions, self._partial in order:
            for boundary, place in zip(turn.before, positions, strict=True):
                at[boundary] = place
            load, left = 0.0, self._partial.left
            for stage in turn.closed:
                load += sums[stage][at[stage + 1]] - sums[stage][at[stage]]
                left -= least[at[stage + 1]] - least[at[stage]]
            if load <= self._limit and self._steps > 0:
                self._choose(turn, 0, load, left, 0.0)
        return self._grown

    def _choose(self, turn: _Turn, number: int, load: float, left: float, crossed: float) -> None:
        """Place the choices of a turn from `number` on, in every way that fits; what is complete joins `_grown`."""
        if number == len(turn.choices):
            if left <= self._later:
                self._keep(turn, load, left, crossed)
            return
        choice, at, problem = turn.choices[number], self._at, self.problem
        here, least, is_last = choice.boundary, problem.least, number == len(turn.choices) - 1
        low = max(self._low[here], at[choice.below] + here - choice.below)
        high = min(self._high[here], at[choice.above] + here - choice.above)
        start, end, room = at[here - 1], at[here + 1], self._limit - load
        before, after = problem.sums[here - 1], problem.sums[here]
        if choice.ends:
            high = min(high, bisect_right(before, before[start] + room) - 1)
            if is_last and not choice.begins:
                low = max(low, bisect_left(least, least[start] + left - self._later))
        if choice.begins:
            low = max(low, bisect_left(after, after[end] - room))
            if is_last and not choice.ends:
                high = min(high, bisect_right(least, least[end] - left + self._later) - 1)
        self._steps -= 1
        for place in range(low, high + 1):
            self._steps -= 1
            new, rest = load, left
            if choice.ends:
                new += before[place] - before[start]
                rest -= least[place] - least[start]
            if choice.begins:
                new += after[end] - after[place]
                rest -= least[end] - least[place]
            if new <= self._limit and self._steps > 0:
                at[here] = place
                self._choose(turn, number + 1, new, rest, crossed + problem.crossing[place])

    def _keep(self, turn: _Turn, load: float, left: float, crossed: float) -> None:
        bytes_or_load, uneven = self._partial.cost
        cost = (bytes_or_load + crossed, uneven + load * load) if self._by_bytes else (max(bytes_or_load, load), 0.0)
        key = tuple([self._at[boundary] for boundary in turn.after])
        if key not in self._grown or cost < self._grown[key].cost:
            placed = tuple([self._at[choice.boundary] for choice in turn.choices])
            self._grown[key] = _Partial(cost, left, placed, self._partial)
