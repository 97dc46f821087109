"""Contiguous partition so that the most loaded rank is as light as can be: the search behind `balance`.

The classic wrong turns are to even out differences, or to subtract the minimum: both can leave a
stage much heavier than it need be. Here one question is asked, and answered exactly: can all loads
stay within a bound? Where every rank has one stage, sweeping the reachable ends of each stage from
the first to the last answers it, and bisection over the bound gives the optimum.

Where ranks have several stages (loop, V, any map), a rank's load is a sum over stages that stand far
apart, and no sweep decides it: that is `several_stages`. Sums are compared to one part in 10^9.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from penstock.errors import ModelError, UsageError
from penstock.rules import is_count
from penstock.schedule.placement import Placement

Weights = Sequence[float] | Sequence[Sequence[float]]  # a number per piece; or for each stage a row of them

ROUNDING = 1e-9
BISECTIONS = 60

Ends = list[int]  # the boundaries between stages, with 0 and the number of atoms at both ends


@dataclass(frozen=True)
class PartitionProblem:
    """Atoms, which no cut takes apart, to be dealt out to stages in order."""

    sums: tuple[list[float], ...]  # by stage: what the first n atoms weigh there, on its rank
    ranks: tuple[int, ...]  # by stage
    base: tuple[float, ...]  # by rank: load that it has anyway
    speeds: tuple[float, ...]  # by rank
    crossing: tuple[float, ...]  # by boundary: bytes that cross a cut there
    grain: float = 0.0  # every load is a multiple of it; 0 where none is known

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def atoms(self) -> int:
        return len(self.crossing) - 1

    def loads(self, ends: Ends) -> list[float]:
        found = list(self.base)
        for stage, (first, end) in enumerate(pairwise(ends)):
            found[self.ranks[stage]] += self.sums[stage][end] - self.sums[stage][first]
        return found

    def bytes(self, ends: Ends) -> float:
        return sum(self.crossing[end] for end in ends[1:-1])

    def reach(self, stage: int, first: int, room: float) -> int:
        """The furthest end of a stage that begins at `first` and has that much room."""
        sums = self.sums[stage]
        return bisect_right(sums, sums[first] + room) - 1

    @cached_property
    def single(self) -> bool:
        """Has every rank one stage?"""
        return len(set(self.ranks)) == len(self.ranks)

    @cached_property
    def least(self) -> list[float]:
        """By boundary: what the atoms from there on weigh at speed 1, on the stages where they weigh least."""
        sides = {id(sums): (sums, self.speeds[rank]) for sums, rank in zip(self.sums, self.ranks, strict=True)}.values()
        steps = [min((sums[n + 1] - sums[n]) * speed for sums, speed in sides) for n in range(self.atoms)]
        found = [0.0] * (self.atoms + 1)
        for n in reversed(range(self.atoms)):
            found[n] = found[n + 1] + steps[n]
        return found

    @cached_property
    def fewest_bytes(self) -> list[float]:
        """By number of cuts: what they cross at the very least."""
        found = [0.0]
        for crossed in sorted(self.crossing[1:-1]):
            found.append(found[-1] + crossed)
        return found


@dataclass(frozen=True)
class Stretch:
    """Neighbouring stages on different ranks, between two boundaries: a classic problem."""

    problem: PartitionProblem
    stages: range
    first: int
    last: int
    before: Sequence[float]  # by rank: load from elsewhere

    def rooms(self, bound: float) -> list[float]:
        ranks = self.problem.ranks
        return [bound * (1 + ROUNDING) - self.before[ranks[stage]] for stage in self.stages]

    def fits(self, bound: float) -> bool:
        """Can every load stay within `bound`? Sweeps the ends that each stage can have."""
        problem, reachable = self.problem, [self.first]
        for left, stage, room in zip(reversed(range(len(self.stages))), self.stages, self.rooms(bound), strict=True):
            if room < 0:
                return False
            ends: list[int] = []
            high = 0
            for start in reachable:
                end = min(problem.reach(stage, start, room), self.last - left)
                ends += range(max(start, high) + 1, end + 1)
                high = max(high, end)
            if not ends:
                return False
            reachable = ends
        return reachable[-1] == self.last

    def least_bound(self, known: float) -> float:
        """The smallest bound that fits, given one that does."""
        ranks = self.problem.ranks
        low, high = max((self.before[ranks[stage]] for stage in self.stages), default=0.0), known
        for _ in range(BISECTIONS):
            if high - low <= ROUNDING / 8 * high:
                break
            middle = (low + high) / 2
            if self.fits(middle):
                high = middle
            else:
                low = middle
        return high

    def cheapest(self, bound: float) -> tuple[float, list[int]] | None:
        """Within `bound`, the cut with the fewest bytes, then the evenest: (bytes, inner boundaries)."""
        problem = self.problem
        table: dict[int, tuple[float, float, tuple[int, ...]]] = {self.first: (0.0, 0.0, ())}
        for left, stage, room in zip(reversed(range(len(self.stages))), self.stages, self.rooms(bound), strict=True):
            grown: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            sums, base = problem.sums[stage], self.before[problem.ranks[stage]]
            for start, (crossed, uneven, inner) in table.items():
                high = min(problem.reach(stage, start, room), self.last - left) if room >= 0 else start
                for end in range(start + 1 if left else max(start + 1, self.last), high + 1):
                    load = base + sums[end] - sums[start]
                    found = (crossed + (problem.crossing[end] if left else 0.0), uneven + load * load)
                    if end not in grown or found < grown[end][:2]:
                        grown[end] = (*found, (*inner, end) if left else inner)
            table = grown
        if self.last not in table:
            return None
        return table[self.last][0], list(table[self.last][2])


def classic(problem: PartitionProblem, slack: float = 0.0) -> Ends:
    """The best cut where every rank has one stage. Loads within `slack` of the best count as equal; bytes decide."""
    whole = Stretch(problem, range(problem.stages), 0, problem.atoms, problem.base)
    most = max(sums[-1] for sums in problem.sums) + max(problem.base)
    found = whole.cheapest(whole.least_bound(most) * (1 + slack))
    assert found is not None
    return [0, *found[1], problem.atoms]


# -- from what the user gives


def pose(
    weights: Weights,
    stages: int,
    allowed: Sequence[int] | None,
    crossing: Sequence[float] | None,
    placement: Placement | None,
    speeds: Sequence[float] | None,
    base: Sequence[float] | None,
) -> tuple[PartitionProblem, list[int]]:
    """The problem that arguments of `partition` make, checked; and the piece that each boundary is before."""
    if not is_count(stages) or stages < 1:
        raise UsageError(f"stages={stages!r}: a model has at least 1 stage")
    rows = _rows(weights, stages)
    count = len(rows[0])
    placement = placement or Placement(range(stages))
    if placement.stages != stages:
        raise UsageError(f"the placement {placement} is for {placement.stages} stages, not {stages}")
    speeds = speeds_of(speeds, placement.ranks)
    places = [0, *_places(count, stages, allowed), count]
    if crossing is not None and len(crossing) < count:
        raise UsageError(f"crossing has {len(crossing)} entries for {count} pieces; pass the bytes before each piece")
    base = [0.0] * stages if base is None else base
    if len(base) != stages:
        raise UsageError(f"base has {len(base)} entries for {stages} stages")
    carried = [sum(base[stage] for stage in placement.stages_of(r)) / speeds[r] for r in range(placement.ranks)]
    problem = PartitionProblem(
        sums=_sums(rows, placement, speeds, places),
        ranks=placement.by_stage,
        base=tuple(carried),
        speeds=tuple(speeds),
        crossing=tuple(0.0 if crossing is None or place in (0, count) else float(crossing[place]) for place in places),
        grain=_grain([*rows, carried], speeds),
    )
    return problem, places


def _grain(rows: Sequence[Sequence[float]], speeds: Sequence[float]) -> float:
    """What every load is a multiple of, where weights are whole numbers."""
    if set(speeds) != {1.0} or not all(weight.is_integer() for row in rows for weight in row):
        return 0.0
    return float(math.gcd(*(int(weight) for row in rows for weight in row)))


def _rows(weights: Weights, stages: int) -> list[list[float]]:
    """For each stage what each piece weighs there; one list for all where that is the same."""
    if not weights:
        raise ModelError(f"there are no pieces to make {stages} stages of; the model has no units")
    rows: list[list[float]] = []
    made: dict[int, list[float]] = {}
    for row in weights if isinstance(weights[0], Sequence) else [weights]:
        assert isinstance(row, Sequence)
        rows.append(made.setdefault(id(row), [float(weight) for weight in row]))  # type: ignore[arg-type]
    if len(rows) == 1:
        rows *= stages
    if len(rows) != stages or len({len(row) for row in rows}) != 1:
        raise UsageError(f"weights has {len(rows)} rows of {[len(row) for row in rows]} pieces for {stages} stages")
    for row in rows:
        bad = [number for number, weight in enumerate(row) if not (weight >= 0 and math.isfinite(weight))]
        if bad:
            raise UsageError(f"piece {bad[0]} weighs {row[bad[0]]}; weights are finite and at least 0")
    return rows


def speeds_of(speeds: Sequence[float] | None, ranks: int) -> list[float]:
    """The speeds that were given, or 1 for all."""
    if speeds is None:
        return [1.0] * ranks
    if len(speeds) != ranks:
        raise UsageError(f"speeds={list(speeds)} has {len(speeds)} entries for {ranks} ranks; pass one for each rank")
    if any(not (speed > 0 and math.isfinite(speed)) for speed in speeds):
        raise UsageError(f"speeds={list(speeds)}: each is above 0; 0.5 takes twice as long as 1")
    return [float(speed) for speed in speeds]


def _places(count: int, stages: int, allowed: Sequence[int] | None) -> list[int]:
    """Where a cut may be, in order."""
    inner = sorted({place for place in (range(1, count) if allowed is None else allowed) if 0 < place < count})
    if len(inner) < stages - 1:
        pieces = f"{count} pieces" if len(inner) == count - 1 else f"{count} pieces with {len(inner)} places to cut"
        raise ModelError(f"{pieces} cannot make {stages} stages; pass stages={len(inner) + 1} or fewer")
    return inner


def _sums(
    rows: list[list[float]], placement: Placement, speeds: Sequence[float], places: Sequence[int]
) -> tuple[list[float], ...]:
    """By stage, the running load at each place; stages that weigh alike share one list."""
    made: dict[tuple[int, float], list[float]] = {}
    for stage, row in enumerate(rows):
        speed = speeds[placement.rank_of(stage)]
        if (id(row), speed) not in made:
            running = [0.0, *accumulate(weight / speed for weight in row)]
            made[id(row), speed] = [running[place] for place in places]
    return tuple(made[id(row), speeds[placement.rank_of(stage)]] for stage, row in enumerate(rows))
