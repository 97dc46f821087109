"""Lower bounds of small pipelines by refutation: a time by which no schedule can end is one that all of them exceed.

For a given time, every compute and message has a window, which the rules of `windows.py` narrow down. Where that alone
leads to no contradiction, each window is cut in two and the halves are tried one by one: a half in which no schedule is
left is cut off, until nothing can be cut off any more ("shaving"). The time is raised for as long as it is refuted.

It takes some seconds for a hundred jobs, and grows with the cube of their number: above `MOST_JOBS` nothing is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.schedule.placement import Placement
from penstock.schedule.timing.costs import Costs
from penstock.tools.search.bounds.windows import Arc, Item, Rules, Windows

MOST_JOBS = 120
# Shares of the bound: by how much it is raised at once, and what is not worth another try.
STEP, GRAIN = 0.02, 0.005
MOST_ROUNDS = 8
ROUNDING = 1e-8


def refuted_bound(placement: Placement, count: int, costs: Costs, caps: Sequence[float], bound: float) -> float:
    """Return a time that no schedule of the placement can beat, at least `bound`, which is known to be one.

    Where not even one microbatch fits into memory, everything is refuted, and the answer says nothing.
    """
    if 3 * placement.stages * count > MOST_JOBS or not 0 < bound < math.inf:
        return bound
    known, rules = bound, _rules(placement, count, costs, caps)
    for refuted in (_by_rules, _by_shaving):
        step = STEP * bound
        while step >= GRAIN * bound and bound < rules.one_by_one:
            if refuted(rules, bound + step):
                bound += step
                step *= 2
            else:
                step /= 4
    return max(known, bound * (1 - ROUNDING))


def _rules(placement: Placement, count: int, costs: Costs, caps: Sequence[float]) -> Rules:
    jobs = _Jobs(placement, count, costs)
    machines: dict[object, list[int]] = {}
    for job, machine in enumerate(jobs.machines):
        machines.setdefault(machine, []).append(job)
    activation, held = (costs.per_stage(name, placement.stages) for name in ("activation", "held"))
    memory = []
    for rank, cap in enumerate(caps):
        items = [
            Item(
                jobs.numbers["F", stage, n],
                jobs.numbers["I", stage, n],
                jobs.numbers["W", stage, n],
                activation[stage] * size,
                held[stage] * size,
            )
            for stage in placement.stages_of(rank)
            for n, size in enumerate(jobs.sizes)
        ]
        if sum(item.activation for item in items) > cap * (1 + ROUNDING):
            memory.append((cap * (1 + ROUNDING), items))
    return Rules(jobs.lengths, jobs.arcs, list(machines.values()), memory)


class _Jobs:
    """The computes of all microbatches, and the messages that occupy a link, in an order in which they could run."""

    def __init__(self, placement: Placement, count: int, costs: Costs) -> None:
        self.sizes = costs.scale(count)
        self.lengths: list[float] = []
        self.machines: list[object] = []  # a rank, or the ranks that a message goes from and to
        self.arcs: list[Arc] = []
        self.numbers: dict[tuple[str, int, int], int] = {}
        self._latest: dict[tuple[str, int, float], int] = {}
        home = placement.by_stage
        forward, _, backward, weight = costs.by_op(placement.stages)
        last = placement.stages - 1
        for n in range(count):
            for stage in range(last + 1):
                arrival = self._carried("ahead", n, (stage - 1, stage), costs, placement) if stage else None
                self._add("F", stage, n, forward[stage], home[stage], arrival)
            for stage in range(last, -1, -1):
                arrival = (self.numbers["F", stage, n], 0.0)
                if stage < last:
                    arrival = self._carried("back", n, (stage + 1, stage), costs, placement)
                job = self._add("I", stage, n, backward[stage], home[stage], arrival)
                self._add("W", stage, n, weight[stage], home[stage], (job, 0.0))

    def _add(self, op: str, stage: int, n: int, length: float, machine: object, after: tuple[int, float] | None) -> int:
        """Add a job, after that of the microbatch before it if both are alike: which is which makes no difference."""
        job = self.numbers[op, stage, n] = len(self.lengths)
        size = self.sizes[n]
        self.lengths.append(length * size)
        self.machines.append(machine)
        if after is not None:
            self.arcs.append(Arc(after[0], job, after[1]))
        if (op, stage, size) in self._latest:
            self.arcs.append(Arc(self._latest[op, stage, size], job, 0.0))
        self._latest[op, stage, size] = job
        return job

    def _carried(
        self, way: str, n: int, edge: tuple[int, int], costs: Costs, placement: Placement
    ) -> tuple[int, float]:
        """Return (job, further time) after which a stage has what another one made: the compute, or its message."""
        source, target = edge
        done = self.numbers["F" if way == "ahead" else "I", source, n]
        ranks = (placement.by_stage[source], placement.by_stage[target])
        occupied, delay = (0.0, 0.0) if ranks[0] == ranks[1] else costs.wire(min(edge), max(edge), ranks)
        if occupied:
            done = self._add(way, source, n, occupied, ranks, (done, 0.0))
        return done, delay


def _by_rules(rules: Rules, time: float) -> bool:
    """Do the rules alone show that no schedule ends by that time?"""
    return bool(rules.narrow(_until(rules, time, 1))[0])


def _by_shaving(rules: Rules, time: float) -> bool:
    """Return the same, with halves of windows cut off."""
    import numpy as np

    windows = _until(rules, time, 1)
    if rules.narrow(windows)[0]:
        return True
    jobs = len(rules.lengths)
    for _ in range(MOST_ROUNDS):
        slack = windows.end[:, 0] - windows.start[:, 0] - rules.lengths
        middle = windows.start[:, 0] + slack / 2
        tries = Windows(np.repeat(windows.start, 2 * jobs, axis=1), np.repeat(windows.end, 2 * jobs, axis=1))
        own = np.arange(jobs)
        tries.end[own, own] = middle + rules.lengths  # the early half
        tries.start[own, jobs + own] = middle  # the late one
        wide = np.tile(slack > ROUNDING * time, 2)
        lost = np.zeros(2 * jobs, dtype=bool)
        lost[wide] = rules.narrow(tries.chosen(wide))
        early, late = lost[:jobs], lost[jobs:]
        if (early & late).any():
            return True
        if not lost.any():
            return False
        windows.start[early, 0] = middle[early]
        windows.end[late, 0] = (middle + rules.lengths)[late]
        if rules.narrow(windows)[0]:
            return True
    return False


def _until(rules: Rules, time: float, questions: int) -> Windows:
    import numpy as np

    shape = (len(rules.lengths), questions)
    return Windows(np.zeros(shape), np.full(shape, float(time)))
