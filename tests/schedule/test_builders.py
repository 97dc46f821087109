"""Every family, for every number of ranks, microbatches and stages per rank; and the closed forms."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest
from tiers import in_tiers, mostly_slow, tiers

from penstock.errors import UsageError
from penstock.schedule import FAMILIES, Op, build, family, lower, simulate, verify
from penstock.schedule.builders import TRAINING
from penstock.schedule.builders.one_f_one_b import rounds

SIZES = [(ranks, microbatches) for ranks in range(1, 9) for microbatches in range(1, 25)]


def stage_counts(name: str, most: int = 4) -> range:
    return range(2, 3) if FAMILIES[name].layout == "v" else range(1, most + 1)


def cases(name: str, stride: int) -> Iterator[tuple[int, int, int]]:
    grid = [(*sizes, stages) for sizes in SIZES for stages in stage_counts(name)]
    return iter(grid[::stride])


def build_and_prove(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> None:
    schedule = build(name, ranks, microbatches, stages_per_rank)
    assert (schedule.ranks, schedule.microbatches) == (ranks, microbatches)
    assert schedule.stages == ranks * stages_per_rank
    assert schedule.forward_only == (name not in TRAINING)
    verify(schedule)
    window = (ranks + microbatches + stages_per_rank) % 4  # by turns with messages alone, or with shards as well
    verify(lower(schedule) if window == 0 else lower(schedule, reduce=True, window=window))


@pytest.mark.parametrize("name", in_tiers(FAMILIES, ["1f1b", "interleaved-zb", "zb-v", "v-min"], FAMILIES))
def test_a_stride_through_all_sizes_is_built_and_proved(name: str) -> None:
    for ranks, microbatches, stages_per_rank in cases(name, stride=43 if FAMILIES[name].layout != "v" else 13):
        build_and_prove(name, ranks, microbatches, stages_per_rank)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_smallest_sizes_are_built_and_proved(name: str) -> None:
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, 2, 3):
            for stages_per_rank in stage_counts(name, 3):
                build_and_prove(name, ranks, microbatches, stages_per_rank)


@pytest.mark.parametrize("stride", tiers(23, 1))
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_size_is_built_and_proved(name: str, stride: int) -> None:
    for ranks, microbatches, stages_per_rank in cases(name, stride):
        build_and_prove(name, ranks, microbatches, stages_per_rank)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_window_of_whole_stages_is_proved(name: str) -> None:
    for window in (1, 2, 3):
        verify(lower(build(name, 3, 5), reduce=True, window=window))


@pytest.mark.parametrize("name", FAMILIES)
def test_skip_edges_are_built_and_proved(name: str) -> None:
    for stages_per_rank in stage_counts(name, 2):
        last = 4 * stages_per_rank - 1
        schedule = build(name, 4, 5, stages_per_rank, skips=[(0, last), (1, last), (0, 2)])
        verify(schedule)
        verify(lower(schedule, reduce=True, window=2))


# -- what the table says of them, and what follows from their orders


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_truly_which_one_it_is_with_one_stage_per_rank(name: str) -> None:
    same = FAMILIES[name].as_one_stage
    for ranks, microbatches in ((1, 2), (3, 5), (4, 9)) if same else ():
        found, wanted = build(name, ranks, microbatches, 1), build(same, ranks, microbatches)
        assert list(found.rows) == list(wanted.rows)


def test_what_a_family_is_like_follows_from_its_order() -> None:
    full = [name for name, entry in FAMILIES.items() if entry.has_full_backwards]
    assert full == ["gpipe", "1f1b", "looped-bfs", "interleaved-1f1b", "dualpipe-v"]
    first = [name for name, entry in FAMILIES.items() if entry.runs_forwards_first]
    assert first == ["gpipe", "looped-bfs", "forward-only"]
    assert set(FAMILIES) - set(TRAINING) == {"forward-only"}


# -- names


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        *(("GPipe", "gpipe"), ("1F1B", "1f1b"), ("Interleaved1F1B", "interleaved-1f1b"), ("LoopedBFS", "looped-bfs")),
        *(("InterleavedZeroBubble", "interleaved-zb"), ("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipe-v")),
        *(("ZB1P", "zb-h1"), ("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b"), ("ScheduleDualPipeV", "dualpipe-v")),
        *(
            ("ZB-V", "zb-v"),
            ("zb_h2", "zb-h2"),
            ("V-MIN", "v-min"),
            ("vhalf", "v-half"),
            ("Forward Only", "forward-only"),
        ),
    ],
)
def test_names_are_taken_in_any_case_and_under_their_usual_aliases(alias: str, name: str) -> None:
    assert family(alias).name == name
    assert build(alias, 2, 2) == build(name, 2, 2)
    assert build(alias, 2, 2).name == name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_name_is_its_own(name: str) -> None:
    assert family(name.upper()) is family(name) is FAMILIES[name]


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        build("1f2b", 2, 2)
    assert str(caught.value) == (
        "there is no schedule '1f2b'; did you mean 1f1b? (known: gpipe, 1f1b, looped-bfs, interleaved-1f1b, zb-h1, "
        "zb-h2, interleaved-zb, group-interleaved, zb-v, v-half, v-min, dualpipe-v, forward-only, auto)"
    )
    with pytest.raises(UsageError, match=r"no schedule 'qqqqqq' \(known: gpipe"):
        build("qqqqqq", 2, 2)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1, 1, 0), (1.0, 1), (True, 1), ("2", 1)])
def test_sizes_are_whole_numbers_from_1(sizes: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="must be a whole number of at least 1, got"):
        build("gpipe", *sizes)


@pytest.mark.parametrize("name", [name for name, entry in FAMILIES.items() if entry.layout == "v"])
def test_a_v_has_two_stages_a_rank_and_says_so(name: str) -> None:
    with pytest.raises(UsageError, match=r"has 2 stages on each rank.*got stages_per_rank=3"):
        build(name, 2, 2, 3)


# -- the closed forms, with equal costs and free hops


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fill_and_drain_cost_ranks_minus_1_slots(name: str) -> None:
    for ranks, microbatches in SIZES:
        timeline = simulate(build(name, ranks, microbatches))
        assert timeline.makespan == 3 * (microbatches + ranks - 1)
        assert timeline.bubble == pytest.approx(Fraction(ranks - 1, microbatches + ranks - 1), abs=1e-12)


def test_1f1b_holds_as_many_microbatches_as_ranks_are_left() -> None:
    for ranks, microbatches in SIZES:
        peaks = simulate(build("1f1b", ranks, microbatches)).peak_activations
        assert peaks == tuple(min(microbatches, ranks - rank) for rank in range(ranks))


def test_gpipe_holds_every_microbatch() -> None:
    assert simulate(build("gpipe", 3, 7)).peak_activations == (7, 7, 7)


@pytest.mark.slow
def test_interleaved_divides_the_idle_share_by_the_stages_a_rank() -> None:
    for ranks in range(1, 9):
        for stages_per_rank in range(1, 5):
            for microbatches in range(ranks, 25, ranks):
                timeline = simulate(build("interleaved-1f1b", ranks, microbatches, stages_per_rank))
                work = stages_per_rank * microbatches
                assert timeline.makespan == 3 * (work + ranks - 1), (ranks, microbatches, stages_per_rank)
                assert timeline.bubble == pytest.approx(Fraction(ranks - 1, work + ranks - 1), abs=1e-12)


@pytest.mark.slow
def test_zb_h1_is_shorter_than_1f1b_in_its_memory() -> None:
    for ranks, microbatches in SIZES:
        ours, plain = (simulate(build(name, ranks, microbatches)) for name in ("zb-h1", "1f1b"))
        assert max(ours.peak_activations) <= max(plain.peak_activations)
        assert ours.makespan <= plain.makespan
        if microbatches >= ranks >= 2:
            assert ours.makespan < plain.makespan


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("zb-v", lambda ranks: ranks),
        ("interleaved-zb", lambda ranks: ranks),
        ("v-half", lambda ranks: (ranks + 2) // 2),
        ("v-min", lambda ranks: (ranks + 4) // 3),
    ],
)
@pytest.mark.parametrize("stride", mostly_slow([5, 1], 5))
def test_peaks_in_whole_rank_microbatches(name: str, whole: object, stride: int) -> None:
    assert callable(whole)
    for ranks, microbatches in SIZES[::stride]:
        peak = max(simulate(build(name, ranks, microbatches, 2)).peak_activations)
        assert peak <= 2 * whole(ranks), (ranks, microbatches)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_zb_v_has_no_idle_slot_in_its_steady_state(ranks: int) -> None:
    schedule = build("zb-v", ranks, 24)
    fill = 2 * ranks
    for row in schedule.rows:
        assert None not in row[fill : schedule.slots - fill]


# -- the order in which they run


def test_rounds_are_even_and_never_shorter_than_the_pipeline_unless_the_batch_is() -> None:
    assert rounds(4, 10) == [5, 5]
    assert rounds(4, 11) == [6, 5]
    assert rounds(4, 3) == [3]
    assert rounds(4, 8) == [4, 4]
    for ranks, microbatches in SIZES:
        sizes = rounds(ranks, microbatches)
        assert sum(sizes) == microbatches
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= min(ranks, microbatches)


def test_looped_bfs_runs_back_in_the_reverse_order() -> None:
    for row in build("looped-bfs", 3, 4, 2).compute().rows:
        forwards = [(action.stage, action.microbatch) for action in row if action and action.op is Op.F]
        backwards = [(action.stage, action.microbatch) for action in row if action and action.op is Op.B]
        assert backwards == forwards[::-1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_several_stages_of_a_rank_run_as_if_they_were_one(name: str) -> None:
    one, three = build(name, 3, 4, 1).compute(), build(name, 3, 4, 3).compute()
    assert three.placement.by_stage == (0, 0, 0, 1, 1, 1, 2, 2, 2)
    for single, block in zip(one.rows, three.rows, strict=True):
        for place, action in enumerate(single):
            parts = block[3 * place : 3 * place + 3]
            assert action is not None
            stages = [3 * action.stage + part for part in range(3)]
            wanted = stages if action.op is Op.F else stages[::-1]
            assert [(part.stage, part.op, part.microbatch) for part in parts if part] == [
                (stage, action.op, action.microbatch) for stage in wanted
            ]


@pytest.mark.slow
def test_backwards_and_forwards_of_the_interleaved_order_may_be_pairs() -> None:
    for ranks, microbatches, stages_per_rank in product(range(1, 7), range(1, 11), range(1, 4)):
        plain = build("interleaved-1f1b", ranks, microbatches, stages_per_rank)
        paired = build("interleaved-1f1b", ranks, microbatches, stages_per_rank, overlap_b_f=True)
        verify(lower(paired))
        for with_pairs, without in zip(paired.rows, plain.rows, strict=True):
            parts = [part for action in with_pairs if action is not None for part in action.parts()]
            assert parts == [action for action in without if action is not None]  # the same order
    assert build("interleaved-1f1b", 2, 4, 2, overlap_b_f=True).draw().splitlines()[2] == (
        "rank 1 .   1F0 1F1 3F0 (3B0;3F1) (3B1;1F2) (1B0;1F3) (1B1;3F2) (3B2;3F3) 3B3 1B2 1B3 ."
    )
    for other in ("gpipe", "auto"):
        with pytest.raises(UsageError, match=f"makes pairs in interleaved-1f1b, not in {other}"):
            build(other, 2, 4, overlap_b_f=True)
