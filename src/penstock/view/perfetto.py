"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing: a process for each run, a thread for each rank.

Computes of every kind are in the category `compute`, what a rank does for its links in
`communication`, and its waits in `wait`. An arrow goes from where a value was sent (or, where sends
were not measured, from the compute that made it) to the compute that used it. A counter shows
what each rank has in flight. Simulated time without a unit is shown as milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

from penstock import writing
from penstock.schedule import Op, Span
from penstock.view.figures import in_flight
from penstock.view.run import Run

Event = dict[str, Any]
SECOND = 1e6  # microseconds, the unit of the format


def save_trace(runs: Sequence[Run], path: str | PathLike[str]) -> None:
    writing.save(path, json.dumps(trace(runs), separators=(",", ":")))


def trace(runs: Sequence[Run]) -> dict[str, Any]:
    events = [event for number, run in enumerate(runs) for event in _Process(number, run).events()]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Process:
    def __init__(self, number: int, run: Run) -> None:
        self.number, self.run, self.timeline = number, run, run.timeline
        self.scale = SECOND if run.timeline.unit == "s" else SECOND / 1000
        self.origin = min((wall.start for wall in run.timeline.walls), default=run.timeline.start)
        self.sent = {span.action: span for span in run.timeline.chores if span.action.op.is_transfer}

    def events(self) -> Iterator[Event]:
        yield self._named("process_name", 0, f"{self.run.label} ({self.run.sizes})")
        for rank in range(self.timeline.ranks):
            yield self._named("thread_name", rank, f"rank {rank}")
            for span in self.timeline.by_rank[rank]:
                yield from self._compute(span)
            each = len(self.timeline.schedule.placement.stages_of(rank))
            for time, held in in_flight(self.timeline, rank):
                amount = {"whole-rank microbatches": held / each}
                yield self._event("C", rank, time, name=f"held, rank {rank}", args=amount)
        for span in self.timeline.chores:
            category = "communication" if span.action.op.is_transfer else "sharding"
            yield self._slice(span, category, str(span.action), span.start, span.length)
        yield from self._arrows()

    def _compute(self, span: Span) -> Iterator[Event]:
        maker = self.timeline.waited_for(span) if span.wait > 0 else None
        if maker is not None:
            name = f"wait for rank {maker.rank} ({maker.action})"
            yield self._slice(span, "wait", name, span.start - span.wait, span.wait)
        yield self._slice(span, "compute", str(span.action), span.start, span.length, waited=span.wait)

    def _arrows(self) -> Iterator[Event]:
        number = self.number << 32  # ids are the whole file's
        for span in self.timeline.spans:
            for _, maker in self.timeline.needed_by(span):
                if maker.rank == span.rank or maker.end > span.start:
                    continue
                number += 1
                source = self._send(maker, span) or maker
                about = {"cat": "communication", "name": f"{maker.action} to {span.action}", "id": number}
                # inside its slice, or the viewers bind the arrow to the next one
                yield self._event("s", source.rank, source.start + 0.5 * source.length, **about)
                yield self._event("f", span.rank, span.start + 0.001 * span.length, bp="e", **about)

    def _send(self, maker: Span, reader: Span) -> Span | None:
        op = Op.SEND_F if maker.action.op is Op.F else Op.SEND_B
        stage, far = maker.action.stage, reader.action.stage
        plain = far == stage + (1 if op is Op.SEND_F else -1)
        action = type(maker.action)(stage, op, maker.action.microbatch, None if plain else far)
        return self.sent.get(action)

    def _slice(self, span: Span, category: str, name: str, start: float, length: float, **args: Any) -> Event:
        about = {"stage": span.action.stage, "microbatch": span.action.microbatch, **args}
        return self._event("X", span.rank, start, cat=category, name=name, dur=length * self.scale, args=about)

    def _named(self, name: str, rank: int, text: str) -> Event:
        return {"ph": "M", "pid": self.number, "tid": rank, "name": name, "args": {"name": text}}

    def _event(self, phase: str, rank: int, time: float, **rest: Any) -> Event:
        at = (time - self.origin) * self.scale
        return {"ph": phase, "pid": self.number, "tid": rank, "ts": at, **rest}
