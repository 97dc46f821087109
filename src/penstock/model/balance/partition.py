"""Where to cut: from what the pieces of a model weigh to stages that keep no rank waiting.

A pipeline runs at the pace of its most loaded rank, so that load is what a cut minimises; a rank's load is the sum over
its stages, divided by its speed. Among equally good cuts the one that fewer bytes cross is taken, then the evener. The
problem is posed in `problem`; nothing here needs torch.

A rank's stages may stand far apart (loop, V, any map). So the sweep that solves it goes rank by rank: it places all
boundaries of a rank's stages at once, and its load is known. What the ranks that are left need to know of those before
them is where the boundaries between the two stand, and nothing else:

    one stage per rank   0 | 1 2 3        after rank 0: one boundary
    V                    0 | 1 1 | 0      two
    loop of two rounds   0 | 1 | 0 | 1    three

Of all ways to place the boundaries so far that agree on these, the best is kept. That is dynamic programming, and
exact. What cannot fit under the limit any more is dropped: just above the optimum little else remains. A sweep has a
budget of steps. Large problems with many stages per rank spend it, and go on with those cuts that have the most work
behind them; the answer says whether a complete sweep has found nothing better.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from penstock.model.balance.problem import ROUNDING, Ends, PartitionProblem, Weights, pose
from penstock.schedule.action import Op
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True)
class Partition:
    """The cuts, what they leave on the ranks, and whether that is known to be the best there is."""

    cuts: tuple[int, ...]  # the numbers of the first pieces of stages 1, 2, ...
    loads: tuple[float, ...]  # Indexed by rank.
    crossing: float
    exact: bool  # no cut has a lighter most loaded rank; else it is the best that was found

    @property
    def largest(self) -> float:
        return max(self.loads)


def partition(
    weights: Weights,
    stages: int,
    *,
    allowed: Sequence[int] | None = None,
    crossing: Sequence[float] | None = None,
    placement: Placement | None = None,
    speeds: Sequence[float] | None = None,
    slack: float = 0.0,
) -> Partition:
    """Find the cut with the lightest most loaded rank: where it is, and what it leaves on the ranks.

    weights    what each piece weighs, or one row of that for each stage (`profile.memory_rows`)
    allowed    pieces before which a cut may be; without it, any
    crossing   bytes that cross a cut before each piece: decides among equals
    placement  which rank has which stage; without it, each stage has its own
    speeds     of the ranks: 0.5 takes twice as long
    slack      loads within this share of the best count as equal (measured times never quite are)
    """
    problem, places = pose(weights, stages, allowed, crossing, placement, speeds)
    ends, exact = lightest(problem, slack)
    cuts = tuple(places[end] for end in ends[1:-1])
    return Partition(cuts, tuple(problem.loads(ends)), problem.bytes(ends), exact)


def counts_of(cuts: Sequence[int], pieces: int) -> list[int]:
    """Return how many pieces each stage has: what `Pipeline(balance=[...])` takes."""
    return [end - first for first, end in pairwise([0, *cuts, pieces])]


def counts_between(cuts: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the pieces with which a stage may begin, `starts`, each stage has."""
    bounds = [0, *cuts, max((*starts, *cuts), default=0) + 1]
    return tuple(sum(first <= start < end for start in starts) for first, end in pairwise(bounds))


def bytes_across(spans: Iterable[tuple[int, int, float]], pieces: int) -> list[float]:
    """Return the bytes that cross a cut before each piece, and at the end; spans: (first piece, last piece, bytes)."""
    steps = [0.0] * (pieces + 2)
    for first, last, size in spans:
        steps[first + 1] += size
        steps[last + 1] -= size
    return list(accumulate(steps))[: pieces + 1]


def in_flight(schedule: Schedule) -> list[int]:
    """Return the microbatches that each stage holds when its rank holds the most."""
    found = [0] * schedule.stages
    for rank, row in enumerate(schedule.rows):
        held = dict.fromkeys(schedule.placement.stages_of(rank), 0)
        most = 0
        for action in row:
            for part in () if action is None else action.parts():
                if part.op is Op.F:
                    held[part.stage] += 1
                    if sum(held.values()) > most:
                        most = sum(held.values())
                        for stage, number in held.items():
                            found[stage] = number
                elif part.op is Op.B or part.op is Op.W:
                    held[part.stage] -= 1
    return [1] * schedule.stages if schedule.forward_only else found


STEPS = 600_000  # Of a sweep: less than a second.
MANY = 1000  # cuts so far: of more, some may not be followed
BETTER = 1 - 3 * ROUNDING
# Shares of the way from what no cut can undercut to the best known: short ways are quick.
TRIES = (1 / 64, 1 / 16, 1 / 4, 1.0)


def lightest(problem: PartitionProblem, slack: float = 0.0) -> tuple[Ends, bool]:
    """Return the best cut found, and whether its largest load is proved to be the least.

    Loads within `slack` of the best count as equal, and bytes decide.
    """
    sweep = _Sweep(problem)
    best, exact = _settle(sweep, _start(problem))
    found, _ = sweep.run(problem.largest(best) * (1 + slack), by_bytes=True)
    return (best if found is None else min(found, best, key=problem.bytes)), exact


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
            found, complete = sweep.run(limit)
            if found is not None:
                break
            refuted = limit if complete else refuted
        if found is None or complete:
            return (best if found is None else found), complete
        best, tries = found, TRIES[-1:]
    return best, True


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

    def run(self, limit: float, *, by_bytes: bool = False) -> tuple[Ends | None, bool]:
        """Return the lightest cut within `limit`, or that which fewest bytes cross; and whether all were looked at."""
        problem = self.problem
        self._limit, self._by_bytes = limit * (1 + ROUNDING), by_bytes
        # With one boundary, steps are few.
        left, complete = STEPS * problem.stages if problem.single else STEPS, True
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
        low, high = at[choice.below] + here - choice.below, at[choice.above] + here - choice.above
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
