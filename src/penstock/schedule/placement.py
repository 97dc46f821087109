"""Which rank owns which stage: the only such map in the project.

Everything that asks "where does stage 5 live?" or "what does rank 2 run?" asks a
`Placement`. It is a plain table, so V layouts with any number of turns, unequal stage counts
and maps of the user's own are the same thing as the common ones: nobody does arithmetic on
stage numbers elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.errors import UsageError
from penstock.rules import check_count, is_index


@dataclass(frozen=True)
class Placement:
    """Which rank owns which stage: with `Placement([0, 1, 1, 0])`, stages 0 and 3 are on rank 0.

    Args:
        by_stage: The rank of each stage.
    """

    by_stage: tuple[int, ...]
    ranks: int = field(init=False, compare=False)
    _by_rank: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)

    def __init__(self, by_stage: Iterable[int]) -> None:
        if not isinstance(by_stage, Iterable):
            raise UsageError(f"a placement lists the rank of each stage, such as [0, 1, 1, 0]; got {by_stage!r}")
        table = tuple(by_stage)
        if not table:
            raise UsageError("a placement needs at least one stage; Placement([0]) is one stage on one rank")
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in table):
            raise UsageError(f"ranks are whole numbers from 0; got the placement {list(table)}")
        ranks, owners = max(table) + 1, set(table)
        if len(owners) < ranks:
            empty = next(rank for rank in range(ranks) if rank not in owners)
            raise UsageError(
                f"rank {empty} owns no stage in the placement {list(table)}; "
                f"number the ranks 0 to {len(owners) - 1} without gaps"
            )
        by_rank: list[list[int]] = [[] for _ in range(ranks)]
        for stage, rank in enumerate(table):
            by_rank[rank].append(stage)
        object.__setattr__(self, "by_stage", table)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "_by_rank", tuple(map(tuple, by_rank)))

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 1) -> Placement:
        """Make 0 1 2 3 0 1 2 3: each round starts at rank 0 again.

        Args:
            ranks: Number of ranks.
            stages_per_rank: Number of stages per rank.
        """
        _check_sizes(ranks, stages_per_rank)
        return cls(tuple(range(ranks)) * stages_per_rank)

    @classmethod
    def v(cls, ranks: int, stages_per_rank: int = 2) -> Placement:
        """Make 0 1 2 3 3 2 1 0: each round turns back, so that the value stays on its rank at the turn.

        Args:
            ranks: Number of ranks.
            stages_per_rank: Number of stages per rank.
        """
        _check_sizes(ranks, stages_per_rank)
        there = tuple(range(ranks))
        return cls(rank for turn in range(stages_per_rank) for rank in (there[::-1] if turn % 2 else there))

    @classmethod
    def block(cls, ranks: int, stages_per_rank: int = 1) -> Placement:
        """Make 0 0 1 1 2 2: neighbouring stages together, as if each rank had one larger stage.

        Args:
            ranks: Number of ranks.
            stages_per_rank: Number of stages per rank.
        """
        _check_sizes(ranks, stages_per_rank)
        return cls(rank for rank in range(ranks) for _ in range(stages_per_rank))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.by_stage)

    def rank_of(self, stage: int) -> int:
        """Return the rank that owns a stage.

        Args:
            stage: The stage.
        """
        if not is_index(stage, len(self.by_stage)):
            raise UsageError(f"there is no stage {stage!r}: stages are 0 to {len(self.by_stage) - 1}")
        return self.by_stage[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank owns, in ascending order.

        Args:
            rank: The rank.
        """
        if not is_index(rank, self.ranks):
            raise UsageError(f"there is no rank {rank!r}: ranks are 0 to {self.ranks - 1}")
        return self._by_rank[rank]

    @property
    def stages_per_rank(self) -> int:
        """The largest number of stages on one rank."""
        return max(map(len, self._by_rank))

    def __iter__(self) -> Iterator[int]:
        return iter(self.by_stage)

    def __len__(self) -> int:
        return len(self.by_stage)

    def __str__(self) -> str:
        return " ".join(map(str, self.by_stage))


def _check_sizes(ranks: int, stages_per_rank: int) -> None:
    for name, value in (("ranks", ranks), ("stages_per_rank", stages_per_rank)):
        check_count(name, value)
