"""The problem behind `balance`: contiguous stages, so that the most loaded rank is as light as can be.

The classic wrong turns are to even out differences, or to subtract the minimum: both can leave a stage much heavier
than it need be. What is minimised here is the largest load of a rank, over all of its stages; `sweep` does it.
Sums are compared to one part in 10^9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from penstock.errors import ModelError, UsageError
from penstock.rules import is_count
from penstock.schedule.placement import Placement

Weights = Sequence[float] | Sequence[Sequence[float]]  # a number per piece; or for each stage a row of them

ROUNDING = 1e-9

Ends = list[int]  # the boundaries between stages, with 0 and the number of atoms at both ends


@dataclass(frozen=True)
class PartitionProblem:
    """Atoms, which no cut takes apart, to be dealt out to stages in order."""

    # By stage: what the first n atoms weigh there, on its rank.
    sums: tuple[list[float], ...]
    ranks: tuple[int, ...]  # Indexed by stage.
    speeds: tuple[float, ...]  # Indexed by rank.
    crossing: tuple[float, ...]  # Indexed by boundary: bytes that cross a cut there.
    grain: float = 0.0  # every load is a multiple of it; 0 where none is known

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def atoms(self) -> int:
        return len(self.crossing) - 1

    def loads(self, ends: Ends) -> list[float]:
        found = [0.0] * len(self.speeds)
        for stage, (first, end) in enumerate(pairwise(ends)):
            found[self.ranks[stage]] += self.sums[stage][end] - self.sums[stage][first]
        return found

    def largest(self, ends: Ends) -> float:
        return max(self.loads(ends))

    def bytes(self, ends: Ends) -> float:
        return sum(self.crossing[end] for end in ends[1:-1])

    @cached_property
    def single(self) -> bool:
        return len(set(self.ranks)) == len(self.ranks)

    @cached_property
    def least(self) -> list[float]:
        """What the first n atoms weigh at speed 1, each on the stages where it weighs least."""
        sides = {id(sums): (sums, self.speeds[rank]) for sums, rank in zip(self.sums, self.ranks, strict=True)}.values()
        steps = (min((sums[n + 1] - sums[n]) * speed for sums, speed in sides) for n in range(self.atoms))
        return [0.0, *accumulate(steps)]

    @cached_property
    def floor(self) -> float:
        """No cut is lighter: the whole shared out evenly; and the heaviest atom with the lightest beside it."""
        even = self.least[-1] / sum(self.speeds)
        atoms = sorted(min(sums[n + 1] - sums[n] for sums in self.sums) for n in range(self.atoms))
        others = min(self.ranks.count(rank) for rank in self.ranks) - 1  # stages of its rank, each with an atom
        floor = max(even, atoms[-1] + sum(atoms[:others]))
        return math.ceil(floor / self.grain) * self.grain if self.grain else floor


# -- from what the user gives


def pose(
    weights: Weights,
    stages: int,
    allowed: Sequence[int] | None,
    crossing: Sequence[float] | None,
    placement: Placement | None,
    speeds: Sequence[float] | None,
) -> tuple[PartitionProblem, list[int]]:
    """Check the arguments of `partition`; return the problem that they make, and the piece that each boundary is
    before.
    """
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
    problem = PartitionProblem(
        sums=_sums(rows, placement, speeds, places),
        ranks=placement.by_stage,
        speeds=tuple(speeds),
        crossing=tuple(0.0 if crossing is None or place in (0, count) else float(crossing[place]) for place in places),
        grain=_grain(rows, speeds),
    )
    return problem, places


def _grain(rows: Sequence[Sequence[float]], speeds: Sequence[float]) -> float:
    """Return what every load is a multiple of, where weights are whole numbers."""
    if set(speeds) != {1.0} or not all(weight.is_integer() for row in rows for weight in row):
        return 0.0
    return float(math.gcd(*(int(weight) for row in rows for weight in row)))


def _rows(weights: Weights, stages: int) -> list[list[float]]:
    """Return what each piece weighs on each stage; one shared list where that is the same."""
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
    if speeds is None:
        return [1.0] * ranks
    if len(speeds) != ranks:
        raise UsageError(f"speeds={list(speeds)} has {len(speeds)} entries for {ranks} ranks; pass one for each rank")
    if any(not (speed > 0 and math.isfinite(speed)) for speed in speeds):
        raise UsageError(f"speeds={list(speeds)}: each is above 0; 0.5 takes twice as long as 1")
    return [float(speed) for speed in speeds]


def _places(count: int, stages: int, allowed: Sequence[int] | None) -> list[int]:
    inner = sorted({place for place in (range(1, count) if allowed is None else allowed) if 0 < place < count})
    if len(inner) < stages - 1:
        pieces = f"{count} pieces" if len(inner) == count - 1 else f"{count} pieces with {len(inner)} places to cut"
        raise ModelError(f"{pieces} cannot make {stages} stages; pass stages={len(inner) + 1} or fewer")
    return inner


def _sums(
    rows: list[list[float]], placement: Placement, speeds: Sequence[float], places: Sequence[int]
) -> tuple[list[float], ...]:
    """Sum up the load of each stage up to each place where a cut may be; stages that weigh alike share one list."""
    made: dict[tuple[int, float], list[float]] = {}
    for stage, row in enumerate(rows):
        speed = speeds[placement.rank_of(stage)]
        if (id(row), speed) not in made:
            running = [0.0, *accumulate(weight / speed for weight in row)]
            made[id(row), speed] = [running[place] for place in places]
    return tuple(made[id(row), speeds[placement.rank_of(stage)]] for stage, row in enumerate(rows))
