"""The accountant: where each rank's wall time of a step went, to the last percent.

A rank does one thing at a time, so its step is a row of intervals that do not overlap: computes,
waits, sends, and the gaps between them, which are the host's own work. Each is booked once, the
gaps by their own ends and not as what is left over; that the parts add up to the whole is
therefore a check of the books and not a definition.

    whole = F + B + I + W + waiting for each peer + sends + reduction + optimizer + host

Whoever has ended waits for the rank that ends last. Of a simulation the whole is the makespan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from penstock.schedule import Op, Span, Timeline
from penstock.schedule.timing.timeline import Wall
from penstock.view.figures import percent, time_text


@dataclass(frozen=True)
class RankAccount:
    """One rank's step, in the timeline's unit."""

    rank: int
    whole: float
    compute: Mapping[Op, float]
    waiting: Mapping[int, float]  # Indexed by the rank that was waited for.
    sends: float
    reduction: float
    optimizer: float
    host: float  # the batch, the gaps between actions, the end of the step, the user's own loop

    @property
    def total(self) -> float:
        """The parts together; equal to `whole` but for the clock's grain."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return every part by its name, those of nothing left out but for the computes."""
        found = {op.name: time for op, time in self.compute.items()}
        found |= {f"wait for rank {peer}": time for peer, time in sorted(self.waiting.items())}
        rest = {"sends": self.sends, "reduction": self.reduction, "optimizer": self.optimizer, "host": self.host}
        return found | {name: time for name, time in rest.items() if time}


@dataclass(frozen=True)
class Account:
    """All ranks' books, the chain of actions that decided the step, and what to do about it."""

    timeline: Timeline
    ranks: tuple[RankAccount, ...]

    @property
    def whole(self) -> float:
        """The step's wall time: that of the rank that took longest."""
        return max(entry.whole for entry in self.ranks)

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of computes that decided when the step ended."""
        return self.timeline.critical_path

    @cached_property
    def findings(self) -> tuple[Any, ...]:
        """What could be gained where, largest first; see `advice.Suggestion`."""
        from penstock.view.advice import findings  # It reads accounts itself.

        return findings(self)

    @property
    def advice(self) -> str:
        """One sentence on what to fix first."""
        if self.findings:
            return str(self.findings[0])
        busy = min(sum(entry.compute.values()) / entry.whole for entry in self.ranks if entry.whole)
        return f"nothing stands out: every rank computes for {percent(busy)} of the step or more"

    @property
    def guarded_advice(self) -> str:
        """The same, after what comes before any advice: ranks that share cores."""
        cores, ranks = self.timeline.cores, self.timeline.ranks
        if not 0 < cores < ranks:
            return self.advice
        first = f"give each rank a core first ({cores} for {ranks} ranks here), and measure again"
        return f"{first}; as measured: {self.advice}"

    def path_shares(self) -> dict[str, float]:
        """Sum what the critical path is made of: time by rank, and between ranks."""
        found: dict[str, float] = defaultdict(float)
        for span in self.critical_path:
            found[f"rank {span.rank}"] += span.length
        for before, after in pairwise(self.critical_path):
            if after.start > before.end:
                name = "between actions" if before.rank == after.rank else f"rank {before.rank} -> {after.rank}"
                found[name] += after.start - before.end
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def document(self) -> dict[str, Any]:
        return {
            "unit": self.timeline.unit,
            "whole": self.whole,
            "ranks": [{"rank": entry.rank, "whole": entry.whole, "parts": entry.parts()} for entry in self.ranks],
            "critical_path": self.path_shares(),
            "advice": self.advice,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the books as text: a line for each rank, the critical path, the advice."""
        unit = self.timeline.unit
        for entry in self.ranks:
            parts = ", ".join(
                f"{name} {percent(time / entry.whole)}" for name, time in entry.parts().items() if time and entry.whole
            )
            yield f"rank {entry.rank}: {time_text(entry.whole, unit)} = {parts}"
        shares = ", ".join(f"{name} {time_text(time, unit)}" for name, time in list(self.path_shares().items())[:6])
        yield f"critical path, {len(self.critical_path)} computes: {shares}"
        yield self.guarded_advice


def account(timeline: Timeline) -> Account:
    """Keep the books of a recorded or simulated step."""
    walls = timeline.walls or tuple(_walls(timeline))
    last = max(range(len(walls)), key=lambda rank: walls[rank].end)
    return Account(timeline, tuple(_rank(timeline, rank, walls, last) for rank in range(timeline.ranks)))


def _walls(timeline: Timeline) -> Iterator[Wall]:
    """Derive the walls of a simulation: from the first start to the last end, for every rank."""
    end = timeline.start + timeline.makespan
    for row in timeline.by_rank:
        yield Wall(timeline.start, row[-1].end if row else timeline.start, end)


def _rank(timeline: Timeline, rank: int, walls: tuple[Wall, ...], last: int) -> RankAccount:
    wall = walls[rank]
    compute = dict.fromkeys((Op.F, Op.B, Op.I, Op.W), 0.0)
    waiting: dict[int, float] = defaultdict(float)
    sends = reduction = host = 0.0
    chores = [span for span in timeline.chores if span.rank == rank]
    events = sorted([*timeline.by_rank[rank], *chores], key=lambda span: span.start)
    for span in events:
        op = span.action.op
        if op.is_transfer:
            sends += span.length
        elif op.is_sharding:
            reduction += span.length
        else:
            for part in span.action.parts():
                compute[part.op] += span.length / len(span.action.parts())
        if span.wait:
            maker = timeline.waited_for(span)
            if maker is None:  # taking what was on this rank already
                host += span.wait
            else:
                waiting[maker.rank] += span.wait
    edges = [wall.start + wall.optimizer, *(edge for span in events for edge in (span.start - span.wait, span.end))]
    host += sum(max(0.0, after - before) for before, after in zip(edges[::2], edges[1::2], strict=False))
    sends += max(0.0, wall.end - edges[-1])  # The last message had left then.
    if last != rank:
        waiting[last] += max(0.0, walls[last].end - wall.end)
    host += max(0.0, wall.done - walls[last].end)
    return RankAccount(rank, wall.done - wall.start, compute, dict(waiting), sends, reduction, wall.optimizer, host)
