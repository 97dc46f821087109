"""What must precede an action."""

from __future__ import annotations

from penstock.schedule import Op, Placement, Schedule, Topology, build, parse
from penstock.schedule.dependencies import Stuck, Table, Value, makes, needs, walk

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


def test_a_pair_waits_for_what_either_part_needs_even_if_the_other_makes_it() -> None:
    table = Table(Placement([0]), Topology.chain(1), microbatches=2)
    assert table.needs_of(parse("(0F1;0B1)OVERLAP_F_B")) == [table.base(OUTPUT, 0, 0, 0) + 1]
    assert len(table.needs_of(parse("(0F1;0B0)OVERLAP_F_B"))) == 1


def table_of(schedule: Schedule) -> Table:
    return Table(schedule.placement, schedule.topology, schedule.microbatches)


def test_walk_runs_everything_once_and_never_before_its_needs() -> None:
    for name in ("interleaved-1f1b", "zb-v", "dualpipe-v"):
        schedule = build(name, 3, 5)
        stuck: list[Stuck] = []
        there: set[tuple[Value, int, int]] = set()
        seen = []
        for rank, position, action in walk(schedule.rows, table_of(schedule), stuck):
            assert schedule.rows[rank][position] is action
            seen.append((rank, position))
            for part in action.parts():
                wanted = needs(part.op, part.stage, schedule.topology)
                assert there >= {(value, stage, part.microbatch) for value, stage in wanted}
                there |= {(value, part.stage, part.microbatch) for value in makes(part.op)}
        assert not stuck
        assert len(seen) == len(set(seen)) == sum(action is not None for row in schedule.rows for action in row)


def test_walk_says_who_is_stuck_where_and_why() -> None:
    schedule = Schedule.from_text(["0F0 0B0", "1B0 1F0"])
    stuck: list[Stuck] = []
    ran = [str(action) for _, _, action in walk(schedule.rows, table_of(schedule), stuck)]
    assert ran == ["0F0"]
    assert [(item.rank, item.position, str(item.action), str(item.maker)) for item in sorted(stuck)] == [
        (0, 1, "0B0", "1B0"),
        (1, 0, "1B0", "1F0"),
    ]
