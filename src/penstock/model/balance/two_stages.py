"""Two stages on every rank, in a loop or a V: can all loads stay within a bound?

Rank by rank, a rank takes the next atoms of the first round (from the left) and of the second: in
a V from the right end, in a loop onwards from where the second round begins, which is tried at
every place. A state is how far both rounds have come.

    loop   0 1 2 | 0 1 2     first: 0 -> m     second: m -> end
    V      0 1 2 | 2 1 0     first: 0 -> t     second: end -> t

A first sweep keeps, of the states that are equally far in one round, the one that is furthest in
the other: quick, and nearly always right, but not always, because a rank that took less may leave
a light atom to a stage that must not be empty. Where it finds nothing, a second sweep keeps all
states, and its No is a proof. What cannot fit any more, because the work that is left exceeds the
room that is left, is dropped: near the optimum little else remains.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from enum import Enum

from penstock.model.balance.partition import ROUNDING, Ends, PartitionProblem

State = tuple[int, int]  # how far the first round is, and the second
States = dict[State, State]  # each with the one before it


class Verdict(Enum):
    """What is known about a bound."""

    FOUND = "a cut within it"
    NONE = "there is none"
    UNKNOWN = "not decided"


def takes(problem: PartitionProblem) -> bool:
    """Are there two rounds, in a loop or a V?"""
    half = problem.stages // 2
    first, second = problem.ranks[:half], problem.ranks[half:]
    return len(set(first)) == half and second in (first, first[::-1])


def two_rounds(problem: PartitionProblem, bound: float, steps: int, quick: bool = False) -> tuple[Verdict, Ends | None]:
    """A cut within `bound`, or that there is none; not decided where the steps run out, or in the quick sweep alone."""
    half = problem.stages // 2
    turns = problem.ranks[half:] == problem.ranks[:half][::-1]
    for keep_all in (False,) if quick else (False, True):
        sweep = _Sweep(problem, bound * (1 + ROUNDING), steps, keep_all)
        found = next(sweep.v() if turns else sweep.loop(), None)
        if found is not None:
            return Verdict.FOUND, found
    return (Verdict.NONE if sweep.left > 0 and not quick else Verdict.UNKNOWN), None


class _Sweep:
    def __init__(self, problem: PartitionProblem, bound: float, steps: int, keep_all: bool) -> None:
        self.problem = problem
        self.left = steps
        self.keep_all = keep_all
        self.half = problem.stages // 2
        order = problem.ranks[: self.half]
        self.rooms = [bound - problem.base[rank] for rank in order]
        after = [0.0]  # by rank, in order: the room of those after it, at speed 1
        for rank, room in zip(reversed(order), reversed(self.rooms), strict=True):
            after.append(after[-1] + room * problem.speeds[rank])
        self.after = [room * (1 + ROUNDING) for room in reversed(after)][1:]

    def v(self) -> Iterator[Ends]:
        """From both ends inwards, until they meet."""
        problem, atoms = self.problem, self.problem.atoms
        least = problem.least
        layers: list[States] = [{(0, atoms): (0, atoms)}]
        for number in range(self.half):
            right, later = problem.sums[problem.stages - 1 - number], 2 * (self.half - 1 - number)

            def ends(second: int, room: float, end: int, right: list[float] = right, later: int = later) -> range:
                return range(max(bisect_left(right, right[second] - room), end + later), second)

            layers.append(self._grow(layers[-1], number, ends, lambda i, j: least[i] - least[j], atoms - later, -1))
        for state in layers[-1]:
            if state[0] == state[1]:
                there, back = _trace(layers, state)
                yield [*there, *back[-2::-1]]

    def loop(self) -> Iterator[Ends]:
        """For every place where the second round can begin."""
        problem, atoms, least = self.problem, self.problem.atoms, self.problem.least
        for middle in range(self.half, atoms - self.half + 1):
            layers: list[States] = [{(0, middle): (0, middle)}]
            beyond = least[middle]
            for number in range(self.half):
                onward, later = problem.sums[self.half + number], self.half - 1 - number

                def ends(second: int, room: float, _: int, onward: list[float] = onward, later: int = later) -> range:
                    high = min(bisect_right(onward, onward[second] + room) - 1, atoms - later)
                    return range(high, second, -1)

                def remaining(first: int, second: int, beyond: float = beyond) -> float:
                    return least[first] - beyond + least[second]

                layers.append(self._grow(layers[-1], number, ends, remaining, middle - later, 1))
            if (middle, atoms) in layers[-1]:
                there, onwards = _trace(layers, (middle, atoms))
                yield [*there, *onwards[1:]]

    def _grow(
        self,
        states: States,
        number: int,
        ends: Callable[[int, float, int], range],
        remaining: Callable[[int, int], float],
        last: int,
        sign: int,
    ) -> States:
        """One more rank: all that it can take of the first round, and with each of the second, most first."""
        left, room, later = self.problem.sums[number], self.rooms[number], self.after[number]
        grown: States = {}
        for state in states:
            start, second = state
            for end in range(start + 1, last + 1):
                rest = room - (left[end] - left[start])
                if rest < 0 or self.left <= 0:
                    break
                self.left -= 1
                for taken in ends(second, rest, end):
                    if remaining(end, taken) > later:
                        break
                    self.left -= 1
                    grown[end, taken] = state
                    if not self.keep_all:
                        break
        return grown if self.keep_all else _undominated(grown, sign)


def _undominated(states: States, sign: int) -> States:
    """Without those that are behind another one in both rounds."""
    kept: States = {}
    best: int | None = None
    for first, second in sorted(states, key=lambda state: (-state[0], -state[1] * sign)):
        if best is None or (second - best) * sign > 0:
            kept[first, second] = states[first, second]
            best = second
    return kept


def _trace(layers: list[States], state: State) -> tuple[list[int], list[int]]:
    """The ends of both rounds' stages, from the first rank to the last."""
    found = []
    for states in reversed(layers):
        found.append(state)
        state = states[state]
    return [first for first, _ in reversed(found)], [second for _, second in reversed(found)]
