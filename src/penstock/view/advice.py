"""What to fix first: each suspicion is tried in the simulator, and the largest gain is named.

The run is priced with its own costs, link by link. Then one thing is repaired at a time (the
stages made even, the slow link made like the others, another schedule) and priced again: the
difference is what the repair is worth. A fault of the machine or of the cut comes before a
better schedule, because it would hurt any schedule.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.schedule import FAMILIES, Costs, Schedule, build, simulate
from penstock.tools.search.calibrate import costs_of, hops
from penstock.view.figures import percent, time_text

if TYPE_CHECKING:
    from penstock.view.account import Account

WORTH = 0.03  # Less of the step is noise.
SLOWER = 1.08  # A stage or rank is called slow from this ratio to the others on.
SLOW_LINK = 2.0
ENOUGH = 3  # messages that were waited for, before a link is judged by its fastest one
MOST_SPANS = 50_000  # A run with more spans is not tried with other schedules.


@dataclass(frozen=True)
class Suggestion:
    """Something that costs time, and what its repair is worth."""

    kind: str  # "stage", "rank", "link", "host", "optimizer" or "schedule"
    fact: str
    remedy: str  # the subject of "would save"
    gain: float  # share of the step
    a_sample: bool = False  # the gain is in time a microbatch, as the step becomes another
    at_most: bool = False

    def __str__(self) -> str:
        most, what = "up to " if self.at_most else "", "time per sample" if self.a_sample else "step"
        return f"{self.fact}; {self.remedy} would save {most}{percent(self.gain)} of the {what}"


def findings(books: Account) -> tuple[Suggestion, ...]:
    """Return everything that is worth a repair, what to fix first in front."""
    timeline = books.timeline
    if not timeline.spans or not books.whole:
        return ()
    try:
        costs = costs_of(timeline)
    except PenstockError:  # an incomplete recording has costs of its own
        return ()
    trial = _Trial(books, costs)
    faults = [*trial.stages(), *trial.links(), *trial.overheads()]
    found = sorted(faults, key=lambda entry: -entry.gain)
    if len(timeline.spans) <= MOST_SPANS and not timeline.schedule.forward_only:
        found += sorted(trial.schedules(), key=lambda entry: -entry.gain)[:1]
    return tuple(entry for entry in found if entry.gain >= WORTH)


class _Trial:
    """The run under its own costs, to be priced again with one thing repaired."""

    def __init__(self, books: Account, costs: Costs) -> None:
        self.books = books
        self.schedule: Schedule = books.timeline.schedule.compute()
        self.costs = costs
        self.waited = hops(books.timeline)
        self.enough = min(ENOUGH, self.schedule.microbatches)
        self.edges = {edge: self._edge(edge) for edge in self.schedule.topology.edges}
        self.now = self._price(self.costs, self.edges)

    def _edge(self, edge: tuple[int, int]) -> float:
        """Return the slower way of an edge, where somebody waited for it; else the usual hop."""
        rank_of = self.schedule.placement.rank_of
        if rank_of(edge[0]) == rank_of(edge[1]):
            return 0.0
        ways = [times for way in (edge, edge[::-1]) if len(times := self.waited.get(way, ())) >= self.enough]
        # the first quartile is a message's time without what held up a few
        return max((sorted(times)[len(times) // 4] for times in ways), default=self.costs.hop)

    def _price(self, costs: Costs, edges: dict[tuple[int, int], float]) -> float:
        return simulate(self.schedule, replace(costs, hop=0.0, bandwidth=1.0, bytes=edges)).makespan

    def _gain(self, costs: Costs, edges: dict[tuple[int, int], float]) -> float:
        return (self.now - self._price(costs, edges)) / self.books.whole

    def stages(self) -> Iterator[Suggestion]:
        """Suggest about a stage, or all stages of a rank, slower than the others; repaired: all even."""
        count, placement = self.schedule.stages, self.schedule.placement
        by_op = [self.costs.per_stage(name, count) for name in ("forward", "input", "weight")]
        times = [sum(parts) for parts in zip(*by_op, strict=True)]
        if count < 2 or placement.ranks < 2:
            return
        forward, backward, weight = (sum(values) / count for values in by_op)
        gain = self._gain(replace(self.costs, forward=forward, input=backward, weight=weight), self.edges)
        slow = max(range(count), key=lambda stage: times[stage])
        rank = placement.rank_of(slow)
        own = placement.stages_of(rank)
        others = statistics.median(times[stage] for stage in range(count) if stage not in own)
        if len(own) > 1 and others and min(times[stage] for stage in own) > SLOWER * others:
            ratio = statistics.fmean(times[stage] for stage in own) / others
            names = ", ".join(map(str, own))
            fact = f"rank {rank} (stages {names}) is {100 * (ratio - 1):.0f} % slower than the others"
            yield Suggestion("rank", fact, "less work for it, or a faster device,", gain)
        else:
            others = statistics.median(times[:slow] + times[slow + 1 :])
            if others and times[slow] > SLOWER * others:
                fact = f"stage {slow} (rank {rank}) is {100 * (times[slow] / others - 1):.0f} % slower than the others"
                yield Suggestion("stage", fact, "a better balance", gain)

    def links(self) -> Iterator[Suggestion]:
        """Suggest about a way from rank to rank much slower than the others; repaired: like the others."""
        rank_of = self.schedule.placement.rank_of
        by_way: dict[tuple[int, int], list[float]] = defaultdict(list)
        for (source, target), times in self.waited.items():
            by_way[rank_of(source), rank_of(target)] += times
        middles = {way: min(times) for way, times in by_way.items() if len(times) >= self.enough}
        if not middles:
            return
        slow = max(middles, key=lambda way: middles[way])
        others = [time for way, time in middles.items() if way != slow]
        usual = statistics.median(others) if others else 0.0
        faster = middles[slow] - usual  # What held up a few messages is not the link's doing.
        repaired = {
            edge: max(0.0, time - faster) if {rank_of(edge[0]), rank_of(edge[1])} == set(slow) else time
            for edge, time in self.edges.items()
        }
        unit = self.books.timeline.unit
        if middles[slow] > SLOW_LINK * usual:
            compared = f", {middles[slow] / usual:.3g} times the others" if usual else ""
            fact = f"the link from rank {slow[0]} to rank {slow[1]} takes {time_text(middles[slow], unit)} per message"
            yield Suggestion("link", fact + compared, "a link like the others", self._gain(self.costs, repaired))
        else:
            fact = f"a message takes {time_text(statistics.median(middles.values()), unit)} from rank to rank"
            gain = self._gain(self.costs, dict.fromkeys(self.edges, 0.0))
            yield Suggestion("link", fact, "faster links, or smaller messages,", gain, at_most=True)

    def overheads(self) -> Iterator[Suggestion]:
        """Suggest about time that is spent neither computing nor waiting."""
        ranks = [entry for entry in self.books.ranks if entry.whole]
        for kind, remedy in (
            ("host", "preparing batches ahead, or larger microbatches,"),
            ("optimizer", "a fused or sharded optimizer"),
            ("reduction", "reducing less often, or overlapping it,"),
        ):
            most = max(ranks, key=lambda entry: getattr(entry, kind) / entry.whole)
            share = getattr(most, kind) / most.whole
            what = {"host": "the host's own work", "optimizer": "the optimizer", "reduction": "reduction"}[kind]
            # what one rank does beside its actions need not hold up the step: half is a fair guess
            fact = f"{what} takes {percent(share)} of rank {most.rank}'s step"
            yield Suggestion(kind, fact, remedy, share / 2, at_most=True)

    def schedules(self) -> Iterator[Suggestion]:
        """Try other families of the same stages, and the same one with twice the microbatches."""
        schedule, idle = self.schedule, self.books.timeline.bubble
        fact = f"the schedule leaves ranks idle for {percent(idle)} of the time"
        yield from (
            Suggestion("schedule", fact, name, (self.now - time) / self.books.whole)
            for name, time in self._families(FAMILIES, schedule.microbatches)
        )
        for _, time in self._families([schedule.name], 2 * schedule.microbatches):
            gain = (self.now - time / 2) / self.books.whole
            yield Suggestion("schedule", fact, f"{2 * schedule.microbatches} microbatches", gain, a_sample=True)

    def _families(self, names: Iterable[str], microbatches: int) -> Iterator[tuple[str, float]]:
        share, left = divmod(self.schedule.stages, self.schedule.ranks)
        skips = self.schedule.topology.skips
        for name in names:
            if name not in FAMILIES or left or not FAMILIES[name].trains:
                continue
            try:
                other = build(name, self.schedule.ranks, microbatches, share, skips=skips)
            except PenstockError:
                continue
            if other.stages == self.schedule.stages:
                yield name, simulate(other, self.costs).makespan
