"""What things cost: time for each compute and hop, memory held and released.

One number serves for all stages, or one for each stage where the cut is uneven. The unit is
the user's: slots, milliseconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import UsageError
from penstock.schedule.action import Op
from penstock.schedule.timeline import Timeline
from penstock.schedule.topology import Topology

__all__ = ["Costs"]

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Times and memory of a pipeline's parts.

    forward, input, weight   time of F, I and W; a full backward B takes input + weight
    hop                      time from the end of a compute until another rank can use its result
    latency, bandwidth, bytes  instead of hop: a message takes latency + bytes / bandwidth, and the
                             messages of one directed link queue for its bandwidth. `bytes` is one
                             number, one for each stage's output, or a mapping {(from, to): bytes}
    activation               memory that F takes and B or W gives back
    held                     what of it stays between I and W (default: all of it)
    """

    forward: PerStage = 1.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    hop: float = 0.0
    latency: float = 0.0
    bandwidth: float | None = None
    bytes: float | Sequence[float] | Mapping[tuple[int, int], float] = 0.0
    activation: PerStage = 1.0
    held: PerStage | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "activation", "held"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, float)):
                if not isinstance(value, Sequence) or isinstance(value, str):
                    raise UsageError(f"{name} takes one number or one for each stage, got {value!r}")
                object.__setattr__(self, name, tuple(value))
            _check(name, _numbers(getattr(self, name)))
        sizes = self.bytes.values() if isinstance(self.bytes, Mapping) else _numbers(self.bytes)
        for name, numbers in (("hop", [self.hop]), ("latency", [self.latency]), ("bytes", sizes)):
            _check(name, numbers)
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise UsageError(f"bandwidth must be above 0, got {self.bandwidth}; leave it out for free transfers")
        if self.hop and (self.latency or self.bandwidth is not None):
            raise UsageError("give either hop, or latency and bandwidth with bytes; not both")
        if any(sizes) and self.bandwidth is None:
            raise UsageError("bytes take time only on a link of some bandwidth; give bandwidth, or hop instead")

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> Costs:
        """The costs of a run: the median of each op of each stage, and of messages that were waited for.

        A stage that ran full backwards only tells I + W together: half is taken for each.
        """
        from penstock.schedule.calibrate import costs_of

        return costs_of(timeline)

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """One number for each stage of `forward`, `input`, `weight`, `activation` or `held`."""
        value = getattr(self, name)
        if name == "held" and value is None:
            return self.per_stage("activation", stages)
        if isinstance(value, tuple):
            if len(value) != stages:
                raise UsageError(
                    f"{name} has {len(value)} numbers for {stages} stages; give one for each, or one in all"
                )
            return value
        return (value,) * stages

    def by_op(self, stages: int) -> list[tuple[float, ...]]:
        """Time by op and stage, for the four computes."""
        forward, backward_input, weight = (self.per_stage(name, stages) for name in ("forward", "input", "weight"))
        full = tuple(i + w for i, w in zip(backward_input, weight, strict=True))
        return [forward, full, backward_input, weight]

    def check_edges(self, topology: Topology) -> None:
        """Refuse `bytes` for stages or edges that the topology does not have, or not for all it has."""
        if isinstance(self.bytes, Mapping):
            odd = sorted(set(self.bytes) ^ set(topology.edges))
            if odd:
                what = "no such edge" if odd[0] in self.bytes else "no bytes for that edge"
                raise UsageError(f"bytes by edge must name the topology's edges, all of them; {odd[0]}: {what}")
        elif isinstance(self.bytes, Sequence) and len(self.bytes) != topology.stages:
            raise UsageError(
                f"bytes has {len(self.bytes)} numbers for {topology.stages} stages; give one for each stage's output"
            )

    def wire(self, source: int, target: int) -> tuple[float, float]:
        """(time that a message of the edge occupies its link, time until it is there after that)."""
        if self.bandwidth is None:
            return 0.0, self.hop or self.latency
        if isinstance(self.bytes, Mapping):
            size = self.bytes[source, target]
        elif isinstance(self.bytes, Sequence):
            size = self.bytes[source]
        else:
            size = self.bytes
        return size / self.bandwidth, self.latency


def _check(name: str, numbers: Iterable[float]) -> None:
    for number in numbers:
        if not 0 <= number < math.inf:
            raise UsageError(f"{name} must be 0 or more and finite, got {number}")


def _numbers(value: PerStage | None) -> Sequence[float]:
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, float)) else value


assert list(map(int, (Op.F, Op.B, Op.I, Op.W))) == [0, 1, 2, 3]  # by_op's order
