"""What things cost: time for each compute and hop, memory held and released.

One number serves for all stages, or one for each stage where the cut is uneven. The unit is
the user's: slots, milliseconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

from penstock.errors import UsageError
from penstock.schedule.action import Op
from penstock.schedule.timeline import Timeline
from penstock.schedule.topology import Topology

__all__ = ["Costs", "is_number", "memory_by_op"]

PerStage = float | Sequence[float]


class ByEdge(Mapping[tuple[int, int], float]):
    """Numbers by edge that stay as they were given: costs are values, and so is all that is in them."""

    def __init__(self, numbers: Mapping[tuple[int, int], float]) -> None:
        self._numbers = dict(numbers)

    def __getitem__(self, edge: tuple[int, int]) -> float:
        return self._numbers[edge]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __hash__(self) -> int:
        return hash(frozenset(self._numbers.items()))

    def __repr__(self) -> str:
        return repr(self._numbers)


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
    kept                     what a stage that recomputes keeps from F until its backward: its input. The
                             backward then takes `forward` longer, and `activation` while it runs
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
    kept: PerStage = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "activation", "held", "kept", "bytes"):
            value = getattr(self, name)
            if isinstance(value, Mapping) and name == "bytes":
                object.__setattr__(self, name, ByEdge(value))
            elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
                object.__setattr__(self, name, tuple(value))
            elif not is_number(value) and (name != "held" or value is not None):
                raise UsageError(f"{name} takes one number or one for each stage, got {value!r}")
            _check(name, _numbers(getattr(self, name)))
        _check("hop", [self.hop])
        _check("latency", [self.latency])
        sizes = _numbers(self.bytes)
        if self.bandwidth is not None and (not is_number(self.bandwidth) or not self.bandwidth > 0):
            raise UsageError(f"bandwidth must be above 0, got {self.bandwidth!r}; leave it out for free transfers")
        if self.hop and (self.latency or self.bandwidth is not None):
            raise UsageError("give either hop, or latency and bandwidth with bytes; not both")
        if any(sizes) and self.bandwidth is None:
            raise UsageError("bytes take time only on a link of some bandwidth; give bandwidth, or hop instead")

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> Costs:
        """The costs of a run: the median of each op of each stage, and of messages that were waited for.

        A stage that ran full backwards only tells I + W together: half is taken for each.
        """
        if not isinstance(timeline, Timeline):
            raise UsageError(
                f"from_timeline takes a Timeline, of pipe.record() or Timeline.load(path); got {timeline!r}"
            )
        from penstock.schedule.calibrate import costs_of

        return costs_of(timeline)

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """One number for each stage of `forward`, `input`, `weight`, `activation`, `held` or `kept`."""
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

    def recomputed(self, stages: int, which: Iterable[int]) -> Costs:
        """The same where some stages recompute: time and memory from F to the backward, without what it then takes."""
        chosen = frozenset(which)
        if not chosen:
            return self
        names = ("forward", "input", "activation", "held", "kept")
        forward, backward, activation, held, kept = (self.per_stage(name, stages) for name in names)

        def mixed(plain: Sequence[float], other: Iterable[float]) -> list[float]:
            return [b if stage in chosen else a for stage, (a, b) in enumerate(zip(plain, other, strict=True))]

        return replace(
            self,
            input=mixed(backward, map(sum, zip(backward, forward, strict=True))),
            activation=mixed(activation, kept),
            held=mixed(held, map(min, held, kept)),
        )

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


def memory_by_op(costs: Costs, stages: int, recompute: Iterable[int] = ()) -> list[list[tuple[float, float]]]:
    """By op and stage, for the four computes: (the room that it needs while it runs, what it adds for good)."""
    chosen = frozenset(recompute)
    activation, held, kept = (costs.per_stage(name, stages) for name in ("activation", "held", "kept"))
    found: list[list[tuple[float, float]]] = [[], [], [], []]
    for stage in range(stages):
        whole, rest = activation[stage], held[stage]
        early = kept[stage] if stage in chosen else whole
        found[Op.F].append((early, early))
        found[Op.B].append((whole - early, -early))
        found[Op.I].append((max(whole, rest) - early, rest - early))
        found[Op.W].append((0.0, -rest))
    return found


def is_number(value: object) -> bool:
    """A number, of whatever type; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _check(name: str, numbers: Iterable[float]) -> None:
    for number in numbers:
        if not is_number(number):
            raise UsageError(f"{name} must be 0 or more and finite, got {number!r}, which is no number")
        try:
            good = 0 <= float(number) < math.inf
        except OverflowError:
            raise UsageError(f"{name} must be 0 or more and finite; a whole number of that size is neither") from None
        if not good:
            raise UsageError(f"{name} must be 0 or more and finite, got {number}")


def _numbers(value: PerStage | Mapping[tuple[int, int], float] | None) -> Sequence[float]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(value.values())
    return value if isinstance(value, tuple) else (value,)


assert list(map(int, (Op.F, Op.B, Op.I, Op.W))) == [0, 1, 2, 3]  # by_op's order
