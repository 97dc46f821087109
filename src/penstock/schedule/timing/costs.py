"""What things cost: time for each compute and hop, memory held and released.

One number serves for all stages, or one for each stage where the cut is uneven. The unit is
the user's: slots, milliseconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from penstock.errors import UsageError
from penstock.rules import is_count, is_float, is_index, is_number
from penstock.schedule.action import Op
from penstock.schedule.timing.timeline import Timeline
from penstock.schedule.topology import Topology
from penstock.tool import tool

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
    """Times and memory of the parts of a pipeline. Each may be one number, or one per stage.

    Args:
        forward: Time of `F`.
        input: Time of `I`, the backward for the inputs. A full backward takes `input + weight`.
        weight: Time of `W`, the backward for the weights.
        hop: Time from the end of a compute until another rank can use its result.
        latency: Instead of `hop`: a message takes latency + bytes / bandwidth.
        bandwidth: Bytes per unit of time. Messages of one directed link queue for it.
        bytes: Size of messages: one number, one per stage's output, or a mapping `{(from, to): bytes}`.
        activation: Memory that `F` takes and `B` or `W` gives back.
        held: How much of it stays between `I` and `W`. By default, all of it.
        kept: What a stage that recomputes keeps from `F` until its backward: its input. The backward then takes
            `forward` longer, and `activation` while it runs. More than `activation` is counted as given: recomputing
            then holds more, not less.
        links: Instead of `hop` and `bandwidth`: `links[a][b]` is the time that a message occupies the link from rank a
            to rank b (with `bytes`: the time per byte); `latency` is added.
        sizes: One number per microbatch, if they differ: its times, memory and messages are that many times as large,
            and so is their time by `bandwidth` and `links`. `hop` and `latency` are the same for all.
        overlap: The time of an overlapped pair as a share of the sum of its parts: one number, or
            `{(stage of F, stage of the backward): share}`; the memory of both parts then counts together. By default,
            and for pairs not named, the parts run one after the other.
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
    links: Sequence[Sequence[float]] | None = None
    sizes: Sequence[float] | None = None
    overlap: float | Mapping[tuple[int, int], float] | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "activation", "held", "kept", "bytes"):
            value = getattr(self, name)
            if isinstance(value, Mapping) and name == "bytes":
                object.__setattr__(self, name, _by_pair(name, value, "edges (from stage, to stage)"))
            elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
                object.__setattr__(self, name, tuple(value))
            elif not is_number(value) and (name != "held" or value is not None):
                raise UsageError(f"{name} takes one number or one for each stage, got {value!r}")
            _check(name, _numbers(getattr(self, name)))
        self._check_overlap()
        _check("hop", [self.hop])
        _check("latency", [self.latency])
        sizes = _numbers(self.bytes)
        if self.bandwidth is not None and (not is_float(self.bandwidth) or not self.bandwidth > 0):
            raise UsageError(f"bandwidth must be above 0, got {self.bandwidth!r}; leave it out for free transfers")
        if self.hop and (self.latency or self.bandwidth is not None):
            raise UsageError("give either hop, or latency and bandwidth with bytes; not both")
        if any(sizes) and self.bandwidth is None and self.links is None:
            raise UsageError("bytes take time only on a link of some bandwidth; give bandwidth, or hop instead")
        self._check_links()
        if self.sizes is not None:
            object.__setattr__(self, "sizes", _listed("sizes", self.sizes))

    def _check_overlap(self) -> None:
        if isinstance(self.overlap, Mapping):
            pairs = _by_pair("overlap", self.overlap, "pairs (stage of F, of the backward)")
            object.__setattr__(self, "overlap", pairs)
        elif self.overlap is not None and not is_number(self.overlap):
            raise UsageError(f"overlap takes a share, such as 0.6, or one by pair of stages; got {self.overlap!r}")
        _check("overlap", _numbers(self.overlap))

    def pair_share(self, forward: int, backward: int) -> float | None:
        """Return the time of a pair of these stages as a share of the sum of its parts.

        `None` if nothing is known of it: its parts then run one after the other.

        Args:
            forward: The stage of the forward.
            backward: The stage of the backward.
        """
        if isinstance(self.overlap, Mapping):
            return self.overlap.get((forward, backward))
        return self.overlap

    def _check_links(self) -> None:
        if self.links is None:
            return
        if self.hop or self.bandwidth is not None:
            raise UsageError("links say what each link takes; leave out hop and bandwidth (latency may stay)")
        if not isinstance(self.links, Iterable) or not all(isinstance(row, Iterable) for row in self.links):
            raise UsageError(f"links is a square, one row of numbers per rank; got {self.links!r}")
        rows = tuple(_listed("links", row) for row in self.links)
        if any(len(row) != len(rows) for row in rows):
            raise UsageError(
                f"links is a square, links[a][b] being the time of a message from rank a to rank b; "
                f"got {len(rows)} rows of {', '.join(str(len(row)) for row in rows)} numbers"
            )
        object.__setattr__(self, "links", rows)

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> Costs:
        """Take the costs of a measured run: the median per op and stage, and of messages that were waited for.

        A stage that ran only full backwards shows `I` and `W` together: each gets half.

        Args:
            timeline: The measured timeline.
        """
        if not isinstance(timeline, Timeline):
            raise UsageError(
                f"from_timeline takes a Timeline, of pipe.record() or Timeline.load(path); got {timeline!r}"
            )
        found: Costs = tool("penstock.tools.search.calibrate", "Costs.from_timeline").costs_of(timeline)
        return found

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """Return one number per stage.

        Args:
            name: One of `forward`, `input`, `weight`, `activation`, `held` and `kept`.
            stages: Number of stages.
        """
        value = getattr(self, name)
        if name == "held" and value is None:
            return self.per_stage("activation", stages)
        if isinstance(value, tuple):
            if len(value) != stages:
                raise UsageError(
                    f"{name} has {len(value)} numbers for {stages} stages; give one per stage, or a single one for all"
                )
            return value
        return (value,) * stages

    def by_op(self, stages: int) -> list[tuple[float, ...]]:
        """Time by op and stage, for the four computes.

        Args:
            stages: Number of stages.
        """
        forward, backward_input, weight = (self.per_stage(name, stages) for name in ("forward", "input", "weight"))
        full = tuple(i + w for i, w in zip(backward_input, weight, strict=True))
        return [forward, full, backward_input, weight]

    def recomputed(self, stages: int, which: Iterable[int]) -> Costs:
        """Return the costs where some stages recompute: time and memory from `F` to the backward, without what it then
        takes.

        Args:
            stages: Number of stages.
            which: The stages that recompute.
        """
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
        """Refuse `bytes` and `overlap` for stages or edges that the topology does not have, and `bytes` that miss some.

        Args:
            topology: Which stage reads which.
        """
        for pair in self.overlap if isinstance(self.overlap, Mapping) else ():
            if not all(is_index(stage, topology.stages) for stage in pair):
                raise UsageError(
                    f"overlap names the pair {pair}, but there are {topology.stages} stages, 0 to "
                    f"{topology.stages - 1}; name (stage of F, stage of the backward) among these"
                )
        if isinstance(self.bytes, Mapping):
            odd = sorted(set(self.bytes) ^ set(topology.edges))
            if odd:
                what = "no such edge" if odd[0] in self.bytes else "no bytes for that edge"
                raise UsageError(f"bytes by edge must name the topology's edges, all of them; {odd[0]}: {what}")
        elif isinstance(self.bytes, Sequence) and len(self.bytes) != topology.stages:
            raise UsageError(
                f"bytes has {len(self.bytes)} numbers for {topology.stages} stages; give one for each stage's output"
            )

    def scale(self, microbatches: int) -> tuple[float, ...]:
        """Return how large each microbatch is.

        Args:
            microbatches: Number of microbatches.
        """
        if self.sizes is None:
            return (1.0,) * microbatches
        if len(self.sizes) != microbatches:
            raise UsageError(f"sizes has {len(self.sizes)} numbers for {microbatches} microbatches; give one for each")
        return tuple(self.sizes)

    def wire(self, source: int, target: int, way: tuple[int, int]) -> tuple[float, float]:
        """Return (time that a message of an edge occupies its link, further time until it has arrived).

        Args:
            source: The stage that sends.
            target: The stage that receives.
            way: The ranks that the message goes from and to.
        """
        if self.bandwidth is None and self.links is None:
            return 0.0, self.hop or self.latency
        if isinstance(self.bytes, Mapping):
            size = self.bytes[source, target]
        elif isinstance(self.bytes, Sequence):
            size = self.bytes[source]
        else:
            size = self.bytes
        if self.links is None:
            return size / cast("float", self.bandwidth), self.latency
        if max(way) >= len(self.links):
            raise UsageError(
                f"links are of {len(self.links)} ranks, but there is a rank {max(way)}; give one row per rank"
            )
        return self.links[way[0]][way[1]] * (size if any(_numbers(self.bytes)) else 1.0), self.latency


def memory_by_op(costs: Costs, stages: int, recompute: Iterable[int] = ()) -> list[list[tuple[float, float]]]:
    """Return, by op and stage, for the four computes: (the room that it needs while it runs, what it adds for good)."""
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


def given_costs(costs: Costs | None) -> Costs:
    """Return the costs that a user gave; without any, all computes take 1."""
    if costs is not None and not isinstance(costs, Costs):
        raise UsageError(f"costs must be a Costs, such as Costs(forward=2.0, input=2.0, weight=1.0); got {costs!r}")
    return costs or Costs()


def _by_pair(name: str, numbers: Mapping[tuple[int, int], float], what: str) -> ByEdge:
    for pair in numbers:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(is_count(stage) for stage in pair)):
            raise UsageError(f"{name} names {what}, such as (0, 1); got {pair!r}")
    return ByEdge(numbers)


def _check(name: str, numbers: Iterable[float]) -> None:
    for number in numbers:
        if not is_number(number):
            raise UsageError(f"{name} must be 0 or more and finite, got {number!r}, which is not a number")
        if not is_float(number):
            raise UsageError(f"{name} must be 0 or more and finite; a whole number of hundreds of digits is too large")
        if not 0 <= number < math.inf:
            raise UsageError(f"{name} must be 0 or more and finite, got {number}")


def _listed(name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise UsageError(f"{name} takes a list of numbers, got {values!r}")
    found = tuple(values)
    _check(name, found)
    return found


def _numbers(value: PerStage | Mapping[tuple[int, int], float] | None) -> Sequence[float]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(value.values())
    return value if isinstance(value, tuple) else (value,)


assert list(map(int, (Op.F, Op.B, Op.I, Op.W))) == [0, 1, 2, 3]  # by_op's order
