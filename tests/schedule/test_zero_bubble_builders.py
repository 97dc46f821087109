"""The zero-bubble and V builders keep their promises: complete, finishing, within memory, with little idle time.

The checker here is its own: it runs each order as it stands, with equal costs (F = I = W = 1, B = 2) and
free hops, and knows nothing of how the builders or the simulator think. A pair starts when both of its
parts can and takes as long as both, which is the strictest way to read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from tiers import mostly_slow

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, parse, trusted
from penstock.schedule.builders.dualpipe import dualpipe_v
from penstock.schedule.builders.filling import fill_weights
from penstock.schedule.builders.one_f_one_b import alternate
from penstock.schedule.builders.v import v_half, v_min, v_placement, zb_v
from penstock.schedule.builders.zero_bubble import interleaved_zb, zb_h1, zb_h2
from penstock.schedule.timing.costs import Costs

Orders = list[list[Action]]
DURATION = {Op.F: 1, Op.I: 1, Op.W: 1, Op.B: 2}
GRID = [(ranks, microbatches) for ranks in range(1, 17) for microbatches in (1, 2, 3, 4, 7, 8, 16, 17, 31, 33)]
LARGE = [(23, 50)]


@dataclass
class Run:
    """What came of running an order."""

    starts: list[int]
    ends: list[int]
    idle: list[int]  # of each rank, between its first action and its last
    peak: int
    pictures: list[str]

    @property
    def makespan(self) -> int:
        return max(self.ends)


def needs(action: Action, stages: int) -> list[tuple[int, str, int | None]]:
    """What must have ended before: "F", "gradient" (I or B) or "W" of a stage and microbatch."""
    stage, op, microbatch = action.stage, action.op, action.microbatch
    if op is Op.F:
        return [(stage - 1, "F", microbatch)] if stage else []
    if op is Op.W:
        return [(stage, "gradient", microbatch)]
    return [(stage, "F", microbatch)] + ([(stage + 1, "gradient", microbatch)] if stage + 1 < stages else [])


def run(orders: Orders, placement: Sequence[int], microbatches: int) -> Run:
    """Run the orders, and fail unless they finish and are complete."""
    check_complete(orders, placement, microbatches)
    ended: dict[tuple[int, str, int | None], int] = {}
    rows: list[list[tuple[int, int, Action]]] = [[] for _ in orders]  # start, end, action
    moved = True
    while moved:
        moved = False
        for row, order in zip(rows, orders, strict=True):
            while len(row) < len(order):
                action = order[len(row)]
                awaited = [need for part in action.parts() for need in needs(part, len(placement))]
                if any(need not in ended for need in awaited):
                    break
                start = max([ended[need] for need in awaited] + [row[-1][1] if row else 0])
                end = start + sum(DURATION[part.op] for part in action.parts())
                row.append((start, end, action))
                for part in action.parts():
                    name = "gradient" if part.op in (Op.I, Op.B) else part.op.name
                    ended[part.stage, name, part.microbatch] = end
                moved = True
    assert [len(row) for row in rows] == [len(order) for order in orders], "ranks wait for each other forever"
    idle = [row[-1][1] - row[0][0] - sum(end - start for start, end, _ in row) for row in rows]
    peak = max(peak_of(order) for order in orders)
    return Run([row[0][0] for row in rows], [row[-1][1] for row in rows], idle, peak, [picture(row) for row in rows])


def check_complete(orders: Orders, placement: Sequence[int], microbatches: int) -> None:
    """Each stage and microbatch has one F, and one B or one I and one W, on its own rank."""
    seen = Counter()
    for rank, order in enumerate(orders):
        for part in (part for action in order for part in action.parts()):
            assert placement[part.stage] == rank
            seen[part.stage, part.microbatch, part.op] += 1
    assert set(seen.values()) == {1}
    for stage in range(len(placement)):
        for microbatch in range(microbatches):
            ops = {op for op in Op if (stage, microbatch, op) in seen}
            assert ops in ({Op.F, Op.B}, {Op.F, Op.I, Op.W})
            for op in ops:
                del seen[stage, microbatch, op]
    assert not seen


def peak_of(order: list[Action]) -> int:
    held = peak = 0
    for part in (part for action in order for part in action.parts()):
        held += (part.op is Op.F) - (part.op in (Op.B, Op.W))
        peak = max(peak, held)
    return peak


def picture(row: list[tuple[int, int, Action]]) -> str:
    """One rank's slots: a full backward takes two, and the second is drawn as a dash."""
    cells: list[str] = []
    for start, end, action in row:
        cells += ["."] * (start - len(cells)) + [str(action)] + ["-"] * (end - start - 1)
    return " ".join(f"{cell:3}" for cell in cells).rstrip()


def on_chain(builder: Callable[[int, int], Orders], ranks: int, microbatches: int) -> Run:
    return run(builder(ranks, microbatches), range(ranks), microbatches)


def on_v(builder: Callable[[int, int], Orders], ranks: int, microbatches: int) -> Run:
    return run(builder(ranks, microbatches), v_placement(ranks), microbatches)


def least(ranks: int, microbatches: int) -> int:
    """No order is shorter: the last rank must be filled, and the first must await its first gradient."""
    return max(3 * microbatches + ranks - 1, 2 * ranks - 1 + 2 * microbatches)


def test_zb_h1_is_drawn() -> None:
    assert on_chain(zb_h1, 2, 3).pictures == [
        "0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        ".   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_zb_h2_is_drawn() -> None:
    assert on_chain(zb_h2, 3, 5).pictures == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
        ".   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4",
        ".   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4",
    ]


def test_v_min_is_drawn() -> None:
    assert on_v(v_min, 2, 3).pictures == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 3F2 3I2 0I1 3W2 0I2 0W1 0W2",
        ".   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2",
    ]


def test_dualpipe_v_is_drawn() -> None:
    def cells(text: str) -> list[Action]:
        return [parse(cell) for cell in text.split()]

    assert dualpipe_v(2, 4) == [
        cells(
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B"
            " 3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3"
        ),
        cells(
            "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B"
            " 2B2 1B2 2I3 1I3 2W3 1W3"
        ),
    ]


STRIDES = mostly_slow([4, 1], 4)  # through the sizes


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("builder", [zb_h1, zb_h2])
def test_chains_of_one_stage_a_rank_are_as_short_as_can_be(builder: Callable[[int, int], Orders], stride: int) -> None:
    for ranks, microbatches in (GRID + LARGE)[::stride]:
        whole = ranks if builder is zb_h1 else 2 * ranks - 1
        result = on_chain(builder, ranks, microbatches)
        assert result.makespan == least(ranks, microbatches)
        assert result.peak <= min(microbatches, whole)
        if microbatches >= ranks >= 2:
            assert result.makespan < 3 * (microbatches + ranks - 1)  # that of 1F1B


@pytest.mark.parametrize("stride", STRIDES)
def test_zb_h2_and_zb_v_have_no_idle_slot_inside(stride: int) -> None:
    for ranks, microbatches in (GRID + LARGE)[::stride]:
        if microbatches >= 2 * ranks - 1:
            assert set(on_chain(zb_h2, ranks, microbatches).idle) == {0}
            assert set(on_v(zb_v, ranks, microbatches).idle) == {0}


@pytest.mark.parametrize("stages_per_rank", mostly_slow([1, 2, 3, 4], 2))
def test_interleaved_keeps_to_one_f_one_b_memory(stages_per_rank: int) -> None:
    for ranks in (1, 2, 3, 4, 5, 8):
        placement = list(range(ranks)) * stages_per_rank
        for microbatches in (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24):
            result = run(interleaved_zb(ranks, microbatches, stages_per_rank), placement, microbatches)
            assert result.peak <= stages_per_rank * min(ranks, microbatches)
            if microbatches % ranks == 0:
                assert result.makespan == 3 * stages_per_rank * microbatches + ranks - 1


@pytest.mark.parametrize(
    ("builder", "whole", "idle"),
    [
        (zb_v, lambda ranks: ranks, lambda ranks: ranks - 1),
        (v_half, lambda ranks: (ranks + 2) // 2, lambda ranks: max(0, 3 * ranks - 4)),
        (v_min, lambda ranks: (ranks + 4) // 3, lambda ranks: max(0, 4 * ranks - 5)),
    ],
    ids=["zb_v", "v_half", "v_min"],
)
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_v_keeps_to_its_memory_and_idles_less_than_published(
    builder: Callable[[int, int], Orders], whole: Callable[[int], int], idle: Callable[[int], int], stride: int
) -> None:
    for ranks, microbatches in (GRID + LARGE)[::stride]:
        result = on_v(builder, ranks, microbatches)
        assert result.peak <= 2 * min(microbatches, whole(ranks))
        if microbatches >= ranks:
            assert result.makespan <= 6 * microbatches + idle(ranks)


@pytest.mark.parametrize("stride", STRIDES)
def test_dualpipe_v_holds_half_a_microbatch_more_and_pairs_its_middle(stride: int) -> None:
    for ranks, microbatches in GRID[::stride]:
        orders = dualpipe_v(ranks, microbatches)
        result = run(orders, v_placement(ranks), microbatches)
        assert result.peak <= min(2 * microbatches, 2 * ranks + 1)
        if microbatches >= 2 * ranks - 1:
            assert result.makespan == 6 * microbatches + 2 * (ranks - 1)
            pairs = [sum(action.op is Op.OVERLAP_F_B for action in order) for order in orders]
            middle = [2 * (microbatches - 2 * ranks + rank + 1) + ranks - 1 - rank for rank in range(ranks)]
            middle[-1] -= microbatches > ranks  # the last rank's first full backward is not paired
            assert pairs == middle


def chain(ranks: int, microbatches: int, warmup: Callable[[int], int]) -> Orders:
    def every(rank: int, op: Op) -> list[Action]:
        return [trusted(rank, op, microbatch) for microbatch in range(microbatches)]

    return [alternate(every(rank, Op.F), every(rank, Op.I), warmup(rank)) for rank in range(ranks)]


def test_filling_reaches_the_published_optimum_under_measured_costs() -> None:
    costs = Costs(18.522, 18.086, 9.337, hop=0.601)
    filled = fill_weights(chain(8, 24, lambda rank: 8 - rank), range(8), 8, costs)
    assert filled.makespan == pytest.approx(1310.405)
    assert max(filled.peaks) == 8


def test_filling_says_when_an_order_alone_needs_more_than_the_cap() -> None:
    filled = fill_weights(chain(2, 4, lambda rank: 4 - rank), range(2), cap=2)
    assert filled.peaks == [4, 3]
    check_complete(filled.orders, range(2), 4)


def test_filling_takes_a_cap_for_each_rank() -> None:
    assert fill_weights(chain(2, 6, lambda rank: 2 - rank), range(2), cap=[2, 1]).peaks == [2, 1]


def test_filling_refuses_an_order_that_never_finishes() -> None:
    first = [trusted(0, Op.F, 0), trusted(0, Op.I, 0), trusted(0, Op.F, 1), trusted(0, Op.I, 1)]
    second = [trusted(1, Op.F, 1), trusted(1, Op.I, 1), trusted(1, Op.F, 0), trusted(1, Op.I, 0)]
    with pytest.raises(ScheduleError, match="0I0, 1F1"):
        fill_weights([first, second], range(2), cap=2)
