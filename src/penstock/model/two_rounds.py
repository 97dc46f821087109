"""Two stages on every rank, in a loop or a V: can all loads stay within a bound?

Rank by rank, a rank takes the next atoms of the first round (from the left) and of the second: in
a V from the right end, in a loop onwards from where the second round begins, which is tried at
every place. How far the first round has come decides the best that the second can have done, for
having taken more is never worse. So a state is one number, and what cannot fit any more, because
the work that is left exceeds the room that is left, is dropped.

    loop   0 1 2 | 0 1 2     first: 0 -> m     second: m -> end
    V      0 1 2 | 2 1 0     first: 0 -> t     second: end -> t

Stages may be empty here, which makes "never worse" true and a No a proof; a Yes with an empty
stage that cannot be mended is no answer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import pairwise

from penstock.model.partition import ROUNDING, Ends, Problem

__all__ = ["Verdict", "two_rounds"]

States = dict[int, tuple[int, int]]  # how far the first round is -> how far the second, and the first before


class Verdict(Enum):
    """What is known about a bound."""

    FOUND = "a cut within it"
    NONE = "there is none"
    UNKNOWN = "not decided"


def two_rounds(problem: Problem, bound: float, steps: int) -> tuple[Verdict, Ends | None]:
    """A cut within `bound`, or that there is none; not decided where the placement is another or steps run out."""
    ranks, half = problem.ranks, problem.stages // 2
    first, second = ranks[:half], ranks[half:]
    walled = any(wall != problem.atoms for wall in problem.walls)
    if walled or len(set(first)) != half or second not in (first, first[::-1]):
        return Verdict.UNKNOWN, None
    sweep = _Sweep(problem, bound * (1 + ROUNDING), steps)
    undecided = False
    for ends in sweep.v() if second == first[::-1] else sweep.loop():
        mended = _mended(ends)
        if mended is not None and max(problem.loads(mended)) <= bound * (1 + ROUNDING):
            return Verdict.FOUND, mended
        undecided = True
    return (Verdict.UNKNOWN if undecided or sweep.left <= 0 else Verdict.NONE), None


def _mended(ends: Ends) -> Ends | None:
    """Every stage with an atom at least, the cuts moved as little as that takes."""
    ends = list(ends)
    for place in range(1, len(ends) - 1):
        ends[place] = max(ends[place], ends[place - 1] + 1)
    for place in reversed(range(1, len(ends) - 1)):
        ends[place] = min(ends[place], ends[place + 1] - 1)
    return ends if all(one < other for one, other in pairwise(ends)) else None


class _Sweep:
    def __init__(self, problem: Problem, bound: float, steps: int) -> None:
        self.problem = problem
        self.left = steps
        self.half = problem.stages // 2
        order = problem.ranks[: self.half]
        self.rooms = [bound - problem.base[rank] for rank in order]
        self.after = [0.0]  # by rank, in order: the room of those after it, at speed 1
        for rank, room in zip(reversed(order), reversed(self.rooms), strict=True):
            self.after.append(self.after[-1] + room * problem.speeds[rank])
        self.after = [room * (1 + ROUNDING) for room in reversed(self.after)][1:]

    def v(self) -> Iterator[Ends]:
        """From both ends inwards."""
        problem, atoms = self.problem, self.problem.atoms
        least = problem.least
        layers: list[States] = [{0: (atoms, 0)}]
        for number in range(self.half):
            right = problem.sums[problem.stages - 1 - number]

            def furthest(start: int, room: float, end: int, right: list[float] = right) -> int:
                return max(bisect_left(right, right[start] - room), end)

            layers.append(self._grow(layers[-1], number, furthest, lambda i, j: least[i] - least[j], -1, atoms))
        for turn, (end, _) in layers[-1].items():
            if end <= turn:
                there, back = _trace(layers, turn)
                yield [*there, *back[-2::-1]]
                return

    def loop(self) -> Iterator[Ends]:
        """For every place where the second round can begin."""
        problem, atoms = self.problem, self.problem.atoms
        least = problem.least
        for middle in range(self.half, atoms - self.half + 1):
            layers: list[States] = [{0: (middle, 0)}]
            beyond = least[middle]
            for number in range(self.half):
                onward = problem.sums[self.half + number]

                def furthest(start: int, room: float, _: int, onward: list[float] = onward) -> int:
                    return bisect_right(onward, onward[start] + room) - 1

                def remaining(i: int, j: int, beyond: float = beyond) -> float:
                    return least[i] - beyond + least[j]

                layers.append(self._grow(layers[-1], number, furthest, remaining, 1, middle))
            if layers[-1].get(middle, (0, 0))[0] == atoms:
                there, onwards = _trace(layers, middle)
                yield [*there, *onwards[1:]]

    def _grow(
        self,
        states: States,
        number: int,
        furthest: Callable[[int, float, int], int],
        remaining: Callable[[int, int], float],
        sign: int,
        last: int,
    ) -> States:
        """One more rank: all that it can take of the first round, and with each the most of the second."""
        left, room, later = self.problem.sums[number], self.rooms[number], self.after[number]
        grown: States = {}
        for start, (second, _) in states.items():
            end = start
            while end <= last and self.left > 0:
                rest = room - (left[end] - left[start])
                if rest < 0:
                    break
                self.left -= 1
                taken = furthest(second, rest, end)
                known = grown.get(end)
                if (known is None or (taken - known[0]) * sign > 0) and remaining(end, taken) <= later:
                    grown[end] = (taken, start)
                end += 1
        return _undominated(grown, sign)


def _undominated(states: States, sign: int) -> States:
    """Without those that are behind another one in both rounds."""
    kept: States = {}
    best: int | None = None
    for end in sorted(states, reverse=True):
        second = states[end][0]
        if best is None or (second - best) * sign > 0:
            kept[end] = states[end]
            best = second
    return kept


def _trace(layers: list[States], end: int) -> tuple[list[int], list[int]]:
    """The ends of both rounds' stages, from the first rank to the last."""
    first, second = [], []
    for states in reversed(layers):
        first.append(end)
        second.append(states[end][0])
        end = states[end][1]
    return first[::-1], second[::-1]
