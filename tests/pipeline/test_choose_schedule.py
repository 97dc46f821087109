"""Which schedule a pipeline runs: given, loaded or built for the model's stages; what does not fit says what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.parallel.group.world import World
from penstock.pipeline.choose_schedule import choose_schedule
from penstock.schedule import Topology, build, lower

WORLD = World(None, None, 1.0)


def chosen(schedule: Any, stages: int, microbatches: int | None = None, ranks: int | None = None) -> Any:
    return choose_schedule(schedule, Topology.chain(stages), microbatches, ranks, WORLD)


def test_a_name_is_built_for_as_many_ranks_as_its_family_needs() -> None:
    assert chosen("1f1b", 4, 8).ranks == 4
    assert chosen("zb-v", 4, 8).ranks == 2
    assert chosen("1f1b", 4, 8, ranks=1).ranks == 1


def test_a_schedule_or_its_file_is_taken_as_it_is_and_gets_the_models_skips(tmp_path: Path) -> None:
    given = build("1f1b", ranks=4, microbatches=8)
    given.save(tmp_path / "order.csv")
    assert chosen(given, 4) == given
    assert chosen(str(tmp_path / "order.csv"), 4).rows == given.rows
    skips = Topology.chain(4, skips=[(0, 3)])
    assert choose_schedule(given, skips, None, None, WORLD).topology == skips
    with pytest.raises(UsageError, match="pass the schedule without transfers"):
        choose_schedule(lower(given), skips, None, None, WORLD)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", 4), "say how many microbatches"),
        (("1f1b", 4, 8, 0), "a pipeline has at least 1"),
        (("1f1b", 7, 8, 4), "7 stages cannot fill 4 ranks evenly; split into 8, or pass ranks=1"),
        (("zb-v", 3, 8), "split into 4"),
        ((build("1f1b", ranks=4, microbatches=8), 3), "for 4 stages, the model has 3"),
        ((build("1f1b", ranks=4, microbatches=8), 4, 6), "microbatches=6, but the schedule is for 8"),
        ((build("1f1b", ranks=4, microbatches=8), 4, 8, 2), "ranks=2, but the schedule is for 4"),
    ],
)
def test_what_does_not_fit_says_what_would(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        chosen(*arguments)
