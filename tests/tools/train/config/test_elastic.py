"""The layouts of an elastic run: with which numbers of processes it goes on, and what stays the same in all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.schedule import build
from penstock.tools.train.config.consistent import check_consistent, processes_of, stages_of
from penstock.tools.train.config.elastic import describe_layouts, elastic_layouts, layout_for
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig


def config_of(*settings: str) -> TrainConfig:
    config = load_config(None, ["launch.elastic=true", "model.options.layers=6", *settings])
    check_consistent(config)
    return config


def shape(config: TrainConfig) -> tuple[int, int, int, int]:
    return config.pipeline.ranks, config.mesh.replicas, stages_of(config), config.pipeline.microbatches


def layouts(*settings: str) -> dict[int, tuple[int, int, int, int]]:
    """(ranks, replicas, stages, microbatches) by number of processes."""
    return {count: shape(layout) for count, layout in elastic_layouts(config_of(*settings)).items()}


def test_replicas_are_given_up_first_and_microbatches_keep_their_rows() -> None:
    found = layouts("pipeline.ranks=2", "mesh.replicas=4", "pipeline.microbatches=2", "data.batch=32")
    assert found == {8: (2, 4, 2, 2), 4: (2, 2, 2, 4), 2: (2, 1, 2, 8), 1: (1, 1, 2, 8)}  # 3 do not divide 32 rows
    rows = {32 // replicas / microbatches for _, replicas, _, microbatches in found.values()}
    assert rows == {4}  # in every microbatch, whose random numbers follow its number among all of the batch
    odd = layouts("pipeline.ranks=1", "mesh.replicas=3", "pipeline.microbatches=3", "data.batch=24")
    assert odd[2] == (1, 2, 1, 5)  # 4.5 would be as before: rounded up, so that none has more rows


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["pipeline.ranks=4"], {4: 4, 3: 3, 2: 4, 1: 4}),  # 3 ranks cannot share 4 stages: it is cut anew
        (["pipeline.ranks=4", "pipeline.stages=4"], {4: 4, 2: 4, 1: 4}),  # unless that was asked for
        (["pipeline.ranks=3", "pipeline.balance=[3,3,2]"], {3: 3, 1: 3}),
        (["pipeline.ranks=4", "pipeline.schedule=zb-v"], {4: 8, 3: 6, 2: 4, 1: 2}),  # a V has two stages per rank
        (["pipeline.ranks=4", "pipeline.schedule=zb-v", "pipeline.stages=8"], {4: 8}),
        (["pipeline.ranks=2", "pipeline.schedule=interleaved-1f1b"], {2: 4, 1: 4}),
    ],
)
def test_fewer_ranks_have_the_same_stages_where_the_family_has_room(
    settings: list[str], wanted: dict[int, int]
) -> None:
    found = layouts(*settings)
    assert {count: stages for count, (_, _, stages, _) in found.items()} == wanted
    for count, (ranks, replicas, stages, microbatches) in found.items():
        assert (ranks, replicas) == (count, 1)
        schedule = elastic_layouts(config_of(*settings))[count].pipeline.schedule
        assert build(schedule, ranks, microbatches, stages // ranks).stages == stages  # such a schedule there is


def test_ranks_of_a_schedule_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    build("1f1b", 2, 4).save(path)
    found = layouts("pipeline.ranks=2", "pipeline.microbatches=4", f"pipeline.schedule={path}", "mesh.replicas=2")
    assert found == {4: (2, 2, 2, 4), 2: (2, 1, 2, 4)}


def test_the_parts_of_tensors_stay_and_the_ranks_that_are_shown_do_not_matter() -> None:
    config = config_of("pipeline.ranks=2", "mesh.tp=2", "logging.ranks=[3]")
    assert list(elastic_layouts(config)) == [4, 2]
    assert layout_for(config, 4) == config
    assert layout_for(config, 2).mesh.tp == 2


def test_a_number_without_a_layout_of_its_own_takes_the_largest_one_that_fits() -> None:
    """A host of four was lost, and the three that were left had no layout: the run ended."""
    config = config_of("pipeline.ranks=2", "mesh.replicas=2")
    assert layout_for(config, 3) == layout_for(config, 2)
    assert processes_of(layout_for(config, 3)) == 2


def test_too_many_or_too_few_processes_are_told_the_numbers_that_have_a_layout() -> None:
    config = config_of("pipeline.ranks=2", "mesh.replicas=2")
    words = "4 (2 ranks x 2 replicas, 2 stages, 8 microbatches), 2 (2 ranks, 2 stages, 16 microbatches), 1 (1 rank, 2"
    assert describe_layouts(config).startswith(words)
    with pytest.raises(UsageError, match=r"5 processes have no layout .* these numbers have one: 4 \(2 ranks x 2"):
        layout_for(config, 5)
    with pytest.raises(UsageError, match=r"1 processes have no layout"):
        layout_for(config_of("pipeline.ranks=2", "mesh.tp=2"), 1)


def test_ranks_that_are_threads_are_not_elastic() -> None:
    with pytest.raises(UsageError, match=r"launch\.elastic is about processes"):
        config_of("pipeline.workers=threads")
