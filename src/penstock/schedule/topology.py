"""Which stage's output feeds which stage, and over which links that travels.

Most models are a chain; U-Nets, encoder-decoders and multi-branch models are not. The edges
are explicit from the first day, so that a skip from stage 0 to stage 3 is an ordinary edge
for dependencies, lowering, the proof, the simulator and the executor alike, and nobody
writes `stage + 1`.

A `Link` is how an edge leaves a rank: one message for each value and destination *rank*. Two
stages of one rank that both need the output of stage 0 get it in one message, and the sum of
their gradients goes back in one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import UsageError
from penstock.schedule.placement import Placement


@dataclass(frozen=True)
class Topology:
    """Which stage's output each stage reads.

    Args:
        stages: Number of stages.
        edges: Pairs (from stage, to stage), each from a stage to a later one.
    """

    stages: int
    edges: tuple[tuple[int, int], ...]
    _producers: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    _consumers: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)

    def __init__(self, stages: int, edges: Iterable[tuple[int, int]]) -> None:
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise UsageError(f"a topology needs at least one stage, in whole numbers; got {stages!r}")
        ordered = tuple(sorted({_edge(edge) for edge in _listed(edges)}))
        for source, target in ordered:
            if not 0 <= source < target < stages:
                raise UsageError(
                    f"the edge {source} -> {target} does not fit {stages} stages: an edge goes from a stage "
                    f"to a later one, with both between 0 and {stages - 1}"
                )
        producers: list[list[int]] = [[] for _ in range(stages)]
        consumers: list[list[int]] = [[] for _ in range(stages)]
        for source, target in ordered:
            producers[target].append(source)
            consumers[source].append(target)
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "edges", ordered)
        object.__setattr__(self, "_producers", tuple(map(tuple, producers)))
        object.__setattr__(self, "_consumers", tuple(map(tuple, consumers)))

    @classmethod
    def chain(cls, stages: int, skips: Iterable[tuple[int, int]] = ()) -> Topology:
        """Make a chain, in which each stage feeds the next one, plus skips.

        Args:
            stages: Number of stages.
            skips: Further edges (from stage, to stage).
        """
        return cls(stages, [*((stage, stage + 1) for stage in range(stages - 1)), *_listed(skips)])

    def producers(self, stage: int) -> tuple[int, ...]:
        """Return the stages whose output a stage reads.

        Args:
            stage: The stage that reads.
        """
        return self._producers[stage]

    def consumers(self, stage: int) -> tuple[int, ...]:
        """Return the stages that read the output of a stage.

        Args:
            stage: The stage whose output it is.
        """
        return self._consumers[stage]

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The edges that do not go to the next stage."""
        return tuple((source, target) for source, target in self.edges if target != source + 1)

    @property
    def is_chain(self) -> bool:
        """Whether each stage feeds the next one and no other."""
        return self.edges == tuple((stage, stage + 1) for stage in range(self.stages - 1))


def _listed(edges: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    if not isinstance(edges, Iterable):
        raise UsageError(f"edges, or skips, are pairs (from stage, to stage), such as [(0, 3)]; got {edges!r}")
    return edges


def _edge(edge: object) -> tuple[int, int]:
    ends = tuple(edge) if isinstance(edge, (tuple, list)) else ()
    if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
        raise UsageError(f"an edge, or skip, is two whole numbers (from stage, to stage), such as (0, 3); got {edge!r}")
    return ends


class Link(NamedTuple):
    """The connection between a stage and another rank that needs its output; gradients come back on it.

    Attributes:
        source: The stage that produces the value.
        target: The first of `targets`, which names the link in the notation.
        source_rank: The rank of `source`.
        target_rank: The rank that the value goes to.
        targets: Every stage on `target_rank` that reads the value.
    """

    source: int  # the stage that makes the value
    target: int  # the first stage of `targets`: names the link in the notation
    source_rank: int
    target_rank: int
    targets: tuple[int, ...]  # every stage on target_rank that reads the value


def links(placement: Placement, topology: Topology) -> tuple[Link, ...]:
    """Return every link between different ranks. Edges within a rank need none.

    Args:
        placement: Which rank owns which stage.
        topology: Which stage reads which.
    """
    found = []
    for source in range(topology.stages):
        home = placement.rank_of(source)
        by_rank: dict[int, list[int]] = {}
        for target in topology.consumers(source):
            by_rank.setdefault(placement.rank_of(target), []).append(target)
        found += [
            Link(source, targets[0], home, rank, tuple(targets)) for rank, targets in by_rank.items() if rank != home
        ]
    return tuple(found)
