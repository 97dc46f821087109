"""Layers with their costs, and what stages they make once they are cut.

A `Layer` is the smallest piece that a cut keeps together. A `Shape` is one answer to "how is it cut, and who has
which piece": the rank of each stage, the layers in each, and, where the output layer is split over the ranks, who
has how much of it. From a shape follow the placement, the topology and the costs by stage, which is all that the
rest of the search reads.

The output layer of a language model can take as long as several layers, and no cut evens that out. Its product can
be split over all ranks by rows of the vocabulary. In a schedule that needs no new kind of action: each rank has one
more stage, which reads what the last layers made, and one small stage joins their results. With two ranks and three
stages, the third on rank 0,

    2F0 ----> 3F0 (rank 0's rows) ----> 5F0 (log-sum-exp of all rows, and the loss)
      \\-----> 4F0 (rank 1's rows) ----/

and back the same way. Stage 5 is the barrier: its F waits for all ranks' rows, and no rank's I may start before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from penstock.errors import UsageError
from penstock.rules import is_float
from penstock.schedule.placement import Placement
from penstock.schedule.timing.costs import Costs
from penstock.schedule.topology import Topology

Item = TypeVar("Item")


@dataclass(frozen=True)
class Layer:
    """What one layer takes for one microbatch, on a rank of speed 1.

    Args:
        forward: Time of the forward.
        input: Time of the backward for the inputs. By default, that of the forward.
        weight: Time of the backward for the weights. By default, that of the forward.
        activation: Memory held from the forward on.
        held: How much of it stays between `I` and `W`. By default, all of it.
        kept: What is kept from the forward on when it is recomputed.
        state: Memory held all the time: parameters, gradients, optimizer state.
        bytes: Size of its output.
    """

    forward: float = 1.0
    input: float | None = None
    weight: float | None = None
    activation: float = 1.0
    held: float | None = None
    kept: float = 0.0
    state: float = 0.0
    bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, default in (("input", self.forward), ("weight", self.forward), ("held", self.activation)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for field in fields(self):
            value = getattr(self, field.name)
            if not (is_float(value) and 0 <= value < float("inf")):
                raise UsageError(f"{field.name} of a layer must be a number of 0 or more, got {value!r}")

    @property
    def time(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward + (self.input or 0.0) + (self.weight or 0.0)


@dataclass(frozen=True)
class Hosts:
    """Ranks on several hosts: `Hosts((4, 4), inside=0.1, between=1.0)` has ranks 0-3 on one and 4-7 on another.

    Args:
        ranks: Number of ranks on each host.
        inside: Time of a message within a host.
        between: Time of a message between hosts.
    """

    ranks: Sequence[int]
    inside: float = 0.0
    between: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, Sequence) or not all(type(count) is int and count > 0 for count in self.ranks):
            raise UsageError(f"Hosts takes the number of ranks on each host, such as Hosts((4, 4)); got {self.ranks!r}")

    def matrix(self) -> list[list[float]]:
        """Return the time from each rank to each other one, as `Costs(links=)` takes it."""
        host = [number for number, ranks in enumerate(self.ranks) for _ in range(ranks)]
        return [[self.inside if here == there else self.between for there in host] for here in host]


def listed(name: str, values: Iterable[Item], what: str) -> tuple[Item, ...]:
    """Return the values of an argument that is a list of something."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise UsageError(f"{name} is a list of {what}; got {values!r}")
    return tuple(values)


def layers_of(layers: Iterable[Layer | float]) -> tuple[Layer, ...]:
    """Return the layers; a number is a layer whose F, I and W take that long each."""
    given = listed("layers", layers, "Layer, or of numbers")
    for number, layer in enumerate(given):
        if not isinstance(layer, Layer) and not (is_float(layer) and 0 <= layer < float("inf")):
            raise UsageError(f"forward of a layer must be a number of 0 or more; layer {number} is {layer!r}")
    found = tuple(layer if isinstance(layer, Layer) else Layer(layer) for layer in given)
    if not found:
        raise UsageError("there are no layers to cut; give at least one")
    return found


@dataclass(frozen=True)
class Model:
    """The layers, the ranks that they are for, and the values that skip layers."""

    layers: tuple[Layer, ...]
    speeds: tuple[float, ...]
    base: Costs  # hop, links, latency and the sizes of microbatches
    skips: tuple[tuple[int, int], ...] = ()  # (from layer, to layer)
    memory: tuple[float, ...] = ()  # By rank; none: no cap.
    recompute: bool = False  # may layers recompute where memory is short?

    def held_by(self, layer: Layer) -> float:
        """Return the memory that a layer takes while its largest microbatch is under way."""
        size = layer.kept if self.recompute else layer.activation
        return layer.state + size * max(self.base.sizes or (1.0,))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.speeds)


@dataclass(frozen=True)
class Shape:
    """One cut on ranks. `shares` are of the output layer, the model's last, by rank; empty where it is not split."""

    model: Model
    by_stage: tuple[int, ...]  # the rank of each stage that has layers
    counts: tuple[int, ...]  # how many
    kind: str
    shares: tuple[float, ...] = ()

    @property
    def bounds(self) -> list[int]:
        """The first layer of each stage, and the end."""
        return list(accumulate(self.counts, initial=0))

    @property
    def vocabulary(self) -> list[int]:
        """The ranks that have a part of the output layer."""
        return [rank for rank, share in enumerate(self.shares) if share > 0]

    @property
    def placement(self) -> Placement:
        """Who has which stage; those of the output layer, and the one that joins them, come last."""
        join = [self.by_stage[-1]] if self.shares else []
        return Placement([*self.by_stage, *self.vocabulary, *join])

    @property
    def stages_per_rank(self) -> int:
        """The largest number of stages with layers on one rank."""
        return max(self.by_stage.count(rank) for rank in set(self.by_stage))

    @property
    def topology(self) -> Topology:
        """A chain, with the skips, and with the stages of the output layer."""
        stages, parts = len(self.counts), len(self.vocabulary)
        edges = [(stage, stage + 1) for stage in range(stages - 1)]
        home = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        for source, target in self.model.skips:
            if home[source] < home[target]:
                edges.append((home[source], home[target]))
        if not self.shares:
            return Topology(stages, edges)
        for part in range(stages, stages + parts):
            edges += [(stages - 1, part), (part, stages + parts)]
        return Topology(stages + parts + 1, edges)

    def costs(self) -> Costs:
        """Return, by stage, as `simulate` takes them; a rank of speed 0.5 takes twice as long."""
        speeds, groups = self.model.speeds, [self.model.layers[a:b] for a, b in pairwise(self.bounds)]
        values: dict[str, Any] = {}
        for name in ("forward", "input", "weight", "activation", "held", "kept"):
            timed = name in ("forward", "input", "weight")
            row = [
                sum(getattr(layer, name) for layer in group) / (speeds[rank] if timed else 1.0)
                for group, rank in zip(groups, self.by_stage, strict=True)
            ]
            if name == "kept":  # the input of its first layer
                row = [group[0].kept for group in groups]
            if self.shares:
                whole = getattr(self.model.layers[-1], name)
                row += [whole * self.shares[rank] / (speeds[rank] if timed else 1.0) for rank in self.vocabulary]
                row.append(0.0)
            values[name] = row
        base = self.model.base
        timed_bytes = base.bandwidth is not None or base.links is not None
        return Costs(
            hop=base.hop,
            latency=base.latency,
            bandwidth=base.bandwidth,
            links=base.links,
            sizes=base.sizes,
            bytes=self._edge_bytes() if timed_bytes and any(layer.bytes for layer in self.model.layers) else 0.0,
            **values,
        )

    def _edge_bytes(self) -> dict[tuple[int, int], float]:
        """Return what crosses each edge: the output of the last layer before it, and what skips past that."""
        stages, layers = len(self.counts), self.model.layers
        found = dict.fromkeys(self.topology.edges, 0.0)
        home = [stage for stage, count in enumerate(self.counts) for _ in range(count)]
        outputs = [layers[end - 1].bytes for end in self.bounds[1:]]
        for source, target in found:
            if target == source + 1 < stages or (source == stages - 1 and target < self.placement.stages - 1):
                found[source, target] += outputs[source]
        for first, last in self.model.skips:
            source, target = home[first], home[last]
            if source < target and not (target == source + 1 and first == self.bounds[target] - 1):
                found[source, target] += layers[first].bytes
        return found

    def caps(self, memory: Sequence[float]) -> list[float]:
        """Return what is left of each rank's memory for microbatches."""
        left = list(memory)
        for rank, (first, end) in zip(self.by_stage, pairwise(self.bounds), strict=True):
            left[rank] -= sum(layer.state for layer in self.model.layers[first:end])
        for rank, share in enumerate(self.shares):
            left[rank] -= share * self.model.layers[-1].state
        return left

    def loads(self) -> list[float]:
        """Return, by rank, the time of one microbatch in the stages that are not of the split output layer."""
        loads = [0.0] * self.model.ranks
        for rank, (first, end) in zip(self.by_stage, pairwise(self.bounds), strict=True):
            loads[rank] += sum(layer.time for layer in self.model.layers[first:end]) / self.model.speeds[rank]
        return loads
