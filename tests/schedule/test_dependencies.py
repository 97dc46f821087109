"""What must precede an action."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.schedule import Op, Placement, Schedule, Topology, build
from penstock.schedule.dependencies import Stuck, Table, Value, makes, needs, stuck_at, waits_in_cells, waits_of
from penstock.schedule.events import Outcome, run

OUTPUT, GRADIENT, WEIGHT = Value

NET = Topology.chain(4, skips=[(0, 3)])


def test_a_forward_needs_the_outputs_that_it_reads() -> None:
    assert needs(Op.F, 0, NET) == ()
    assert needs(Op.F, 1, NET) == ((OUTPUT, 0),)
    assert needs(Op.F, 3, NET) == ((OUTPUT, 0), (OUTPUT, 2))


def test_a_backward_needs_its_own_forward_and_the_gradients_of_all_readers() -> None:
    for op in (Op.B, Op.I):
        assert needs(op, 3, NET) == ((OUTPUT, 3),)
        assert needs(op, 2, NET) == ((OUTPUT, 2), (GRADIENT, 3))
        assert needs(op, 0, NET) == ((OUTPUT, 0), (GRADIENT, 1), (GRADIENT, 3))


def test_a_weight_gradient_needs_only_its_own_input_gradient() -> None:
    assert needs(Op.W, 1, NET) == ((GRADIENT, 1),)


def test_a_full_backward_makes_what_its_halves_make() -> None:
    assert makes(Op.F) == (OUTPUT,)
    assert set(makes(Op.B)) == set(makes(Op.I)) | set(makes(Op.W)) == {GRADIENT, WEIGHT}
    assert makes(Op.SEND_F) == makes(Op.UNSHARD) == ()
    assert needs(Op.RECV_B, 0, NET) == ()


def test_the_table_tells_ranks_and_microbatches_apart() -> None:
    table = Table(Placement.loop(2, 2), Topology.chain(4), microbatches=3)
    names = [table.name(position) for position in range(table.size)]
    assert len(set(names)) == table.size
    assert table.name(table.base(OUTPUT, 1, 0, reader=2) + 2) == (OUTPUT, 1, 0, 2)
    (rank, base) = table.carried[Op.F][1][0]
    assert (rank, base) == (0, table.base(OUTPUT, 1, 0, reader=2))
    assert table.needed[Op.F][2] == (base,)


def test_an_output_is_carried_once_to_a_rank_but_a_gradient_once_to_each_producer() -> None:
    both = Topology(3, [(0, 1), (0, 2), (1, 2)])
    ahead = Table(Placement([0, 1, 1]), both, microbatches=1)
    assert [rank for rank, _ in ahead.carried[Op.F][0]] == [1]
    back = Table(Placement([0, 0, 1]), both, microbatches=1)
    assert [rank for rank, _ in back.carried[Op.B][2]] == [0, 0]
    assert len(set(back.carried[Op.B][2])) == 2


def table_of(schedule: Schedule) -> Table:
    return Table(schedule.placement, schedule.topology, schedule.microbatches)


def ran(schedule: Schedule) -> tuple[Outcome, list[Stuck]]:
    """Every cell takes a second."""
    columns, table = schedule.columns, table_of(schedule)
    lengths = np.ones(columns.size)
    lengths[columns.second] = 0
    found = waits_of(table, columns)
    outcome = run(columns.starts, lengths, waits_in_cells(columns, found))
    return outcome, stuck_at(columns, table, found, outcome.stuck)


def test_a_pair_waits_for_what_either_part_needs_even_if_the_other_makes_it() -> None:
    _, stuck = ran(Schedule.from_text("(0F1;0B1) 0F0 0B0"))
    assert [(item.position, str(item.action), str(item.maker)) for item in stuck] == [
        (0, "(0F1;0B1)OVERLAP_F_B", "0F1")
    ]
    assert not ran(Schedule.from_text("0F0 (0F1;0B0) 0B1"))[1]


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("skips", [(), [(0, 2), (0, 3), (1, 5)]])
def test_nothing_starts_before_its_needs_are_made(name: str, skips: list[tuple[int, int]]) -> None:
    schedule = build(name, 3, 5, skips=skips)
    outcome, stuck = ran(schedule)
    assert not stuck
    parts = [part for _, _, part in schedule.parts()]
    ends = dict(zip(parts, outcome.ends.tolist(), strict=True))
    made = {(value, part.stage, part.microbatch): ends[part] for part in parts for value in makes(part.op)}
    for part in parts:
        for value, stage in needs(part.op, part.stage, schedule.topology):
            assert made[value, stage, part.microbatch] <= ends[part] - 1


def test_who_is_stuck_is_told_with_where_and_why() -> None:
    outcome, stuck = ran(Schedule.from_text(["0F0 0B0", "1B0 1F0"]))
    assert outcome.ends.tolist() == [1, -1, -1, -1]
    assert [(item.rank, item.position, str(item.action), str(item.maker)) for item in sorted(stuck)] == [
        (0, 1, "0B0", "1B0"),
        (1, 0, "1B0", "1F0"),
    ]
