"""What went wrong with schedules elsewhere, or here once; each test tells its story."""

from __future__ import annotations

import pytest

from penstock.errors import NotationError, ScheduleError
from penstock.schedule import (
    FAMILIES,
    Action,
    Costs,
    Op,
    Placement,
    Schedule,
    Topology,
    align,
    build,
    faults,
    lower,
    parse,
    simulate,
    verify,
)
from penstock.schedule.builders.one_f_one_b import rounds


def text_of(schedule: Schedule, rank: int) -> str:
    return " ".join(str(action) for action in schedule.rows[rank] if action)


# -- here


@pytest.mark.parametrize("text", ["(0F0;0B0)OVERLAP_F_B", "(0B0;0F0)OVERLAP_B_F", "0F0 (0F1;0B1)OVERLAP_F_B 0B0"])
def test_the_parts_of_a_pair_may_not_need_each_other(text: str) -> None:
    """A pair was opened into its parts, one after the other, so a forward and its own backward passed as a pair: yet
    a handler may run the parts at the same time.
    """
    paired = Schedule.from_text(text)
    said = [str(fault) for fault in faults(paired)]
    assert any("makes, and the parts of a pair may run at the same time; write them apart" in fault for fault in said)
    with pytest.raises(ScheduleError, match="stops here"):
        align(paired)


def test_the_parts_of_a_pair_may_not_need_each_other_by_way_of_another_rank() -> None:
    """Nor may the other part's value come back through other ranks within the pair."""
    paired = Schedule.from_text("(0F0;0B0)OVERLAP_F_B\n1F0 1B0")
    assert faults(paired)
    assert not faults(build("dualpipe-v", 3, 8))


# -- elsewhere


def test_the_printed_1f1b_is_the_one_that_runs() -> None:
    """torch printed a 1F1B whose last rank read 3F1 3B0 ... 3F8 for 8 microbatches: it never forwarded 0 and
    forwarded one that did not exist, because printing and running were two functions. Here they are one object.
    """
    last = text_of(build("1f1b", 4, 8), 3)
    assert last == " ".join(f"3F{microbatch} 3B{microbatch}" for microbatch in range(8))


def test_a_validator_that_counts_sets_passes_duplicates() -> None:
    """torch's check compared sizes of sets: a doubled forward, microbatch 7 of 2 and a backward that was both full
    and split all passed it. Here each is named.
    """
    doubled = Schedule.from_text("0F0 0F1 0F1 0B0 0B1")
    assert [str(fault) for fault in faults(doubled)] == ["rank 0, position 2, 0F1: is there twice; it must run once"]
    foreign = Schedule.from_text("0F0 0F7 0B0 0B7", microbatches=2)
    assert "0F7: microbatch 7 is out of range" in str(faults(foreign)[0])
    mixed = Schedule.from_text("0F0 0F1 0B0 0I0 0W0")
    said = [str(fault) for fault in faults(mixed)]
    assert "rank 0, 0B0: is a full backward, yet 0I0 and 0W0 runs too" in said
    assert "rank 0, 0B1: never runs, nor do 0I1 and 0W1" in said


@pytest.mark.parametrize("text", ["2F0garbage", "2F-1", "2,0", "2F0zzz"])
def test_a_parser_without_an_end_reads_garbage_as_an_action(text: str) -> None:
    """torch's action pattern had no end anchor: `2F0garbage` was 2F0, `2F-1` a forward of no microbatch, and a
    comma inside a character class let `2,0` get far enough for a misleading message.
    """
    with pytest.raises(NotationError, match=rf"'{text}' is not an action: expected <stage><op><microbatch>"):
        parse(text)


def test_two_swapped_sends_of_one_shape_train_on_wrong_data() -> None:
    """A file with two sends swapped was accepted by torch and trained in silence: the shapes fit, so microbatch 1
    was taken for microbatch 0.
    """
    program = lower(build("gpipe", 2, 2))
    row = list(program.rows[0])
    one, two = row.index(parse("0SEND_F0")), row.index(parse("0SEND_F1"))
    row[one], row[two] = row[two], row[one]
    row[one], row[two - 1] = row[two - 1], row[one]  # both are made before either is sent
    with pytest.raises(ScheduleError, match=r"0SEND_F1: is message 0 .* is 1RECV_F0 .*the two orders differ"):
        verify(program.replace([row, program.rows[1]]))


def test_a_last_stage_out_of_order_is_harmless_only_when_the_links_agree() -> None:
    """torch took the last stage's order from its own row but the order of messages from its neighbour's, so a last
    stage that ran 1 before 0 read the wrong activations. Lowered from the order that is written, it is right.
    """
    order = Schedule.from_text(["0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"])
    program = lower(order)
    verify(program)
    assert text_of(program, 1).startswith("1RECV_F0")  # in the order of the sends, whatever is used first


@pytest.mark.parametrize("name", FAMILIES)
def test_fewer_microbatches_than_ranks(name: str) -> None:
    """Interleaved schedules elsewhere put a stage before its input, or a backward before its gradient's receive,
    whenever microbatches were fewer than ranks: a stale or uninitialised buffer was used in silence. Even the
    documented example, 4 ranks and 3 microbatches, was wrong.
    """
    for ranks in (3, 4, 5):
        for microbatches in range(1, ranks):
            schedule = build(name, ranks, microbatches)
            verify(schedule)
            verify(lower(schedule))
            at = {part: slot for _, slot, part in schedule.parts()}
            for action, slot in at.items():
                if action.op is Op.F and action.stage:
                    assert at[Action(action.stage - 1, Op.F, action.microbatch)] < slot


def test_uneven_rounds_and_padding_agree() -> None:
    """One generator padded by stages x ranks while its rounds had another size: 4 ranks, 3 stages, 10 microbatches
    gave -1 idle slots on the last rank, ignored in silence. Here idle slots follow from the order alone.
    """
    assert rounds(4, 10) == [5, 5]
    schedule = build("interleaved-1f1b", 4, 10, 3)
    assert align(schedule.compute()) == schedule
    verify(lower(schedule))


def test_an_order_that_cannot_finish_is_not_cut_short() -> None:
    """An alignment elsewhere simulated for a bounded number of steps and returned what it had: a malformed order
    became an empty schedule, and any overlapped pair dropped the steps behind it (5 of 13 on rank 0).
    """
    with pytest.raises(ScheduleError, match="stops here"):
        align(Schedule.from_text(["0B0 0F0", "1F0 1B0"]))
    schedule = build("dualpipe-v", 2, 6)
    assert any(action and action.pair for row in schedule.rows for action in row)
    count = sum(1 for _ in schedule.parts())
    assert count == sum(1 for _ in align(schedule.compute()).parts()) >= 4 * 6 * 2


def test_a_v_of_four_stages_a_rank_is_a_zig_zag() -> None:
    """`stages - 1 - stage` is a rank only for two stages per rank: with 4 on 2 ranks it gave rank 5."""
    assert Placement.v(2, 4).by_stage == (0, 1, 1, 0, 0, 1, 1, 0)


def test_a_custom_map_moves_the_transfers_with_it() -> None:
    """A custom stage map elsewhere changed the neighbours but not the generators, which kept the loop."""
    order = Schedule.from_text(["0F0 2F0 2B0 0B0", "1F0 3F0 4F0 4B0 3B0 1B0"], placement=[0, 1, 0, 1, 1])
    program = lower(order)
    verify(program)
    assert "3SEND_F0" not in text_of(program, 1)  # stages 3 and 4 share rank 1
    assert "2SEND_F0" in text_of(program, 0)


@pytest.mark.parametrize("pair", ["(0F1;0B0)", "(0B0;0F1)"])
def test_both_orders_of_a_pair_are_seen_by_every_pass(pair: str) -> None:
    """A leaf iterator opened OVERLAP_F_B but not OVERLAP_B_F: sharding did not see those steps and 8 to 12
    computes a rank ran on sharded parameters.
    """
    program = lower(Schedule.from_text(f"0F0 {pair} 0B1"), reduce=True, window=1)
    verify(program)
    assert text_of(program, 0).startswith("0UNSHARD 0F0 (0")
    assert text_of(program, 0).endswith("0B1 0REDUCE_GRAD 0RESHARD")
    bare = program.replace([[action for action in program.rows[0] if action and action.op is not Op.UNSHARD]])
    assert {str(fault.action) for fault in faults(bare)} >= {"0F0", "0F1", "0B0", "0B1"}


def test_reductions_hang_on_the_last_backward_not_on_the_last_number() -> None:
    """Reductions hung on microbatch M - 1. LoopedBFS runs backwards in reverse, so gradients were reduced after 1
    of 4 backwards.
    """
    row = text_of(lower(build("looped-bfs", 1, 4, 1), reduce=True), 0)
    assert row == "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0 0REDUCE_GRAD"


def test_weight_and_input_backwards_have_transfers_and_are_counted() -> None:
    """Executors and lowerings elsewhere had no branch for the split backward: no gradient was sent, no weight
    gradient made, nothing said.
    """
    program = lower(build("zb-h1", 2, 2))
    assert "1I0 1SEND_B0" in text_of(program, 1)
    without = program.replace([[action for action in row if action and action.op is not Op.W] for row in program.rows])
    assert "rank 0, 0W0: never runs, but its other half 0I0 does" in [str(fault) for fault in faults(without)]


def test_a_drawing_with_fewer_slots_than_ranks() -> None:
    """A formatter indexed slots by rank and failed exactly in the error reports of tiny schedules."""
    assert len(Schedule.from_text([f"{rank}F0" for rank in range(12)]).draw().splitlines()) == 13


def test_overlapped_pairs_do_not_collide_as_keys() -> None:
    """A hash elsewhere left out the two halves: every overlapped step was one key."""
    assert len({hash(parse(f"(1F{number};0B0)OVERLAP_F_B")) for number in range(50)}) == 50


def test_idle_slots_are_kept() -> None:
    """torch computed the idle slots of GPipe and 1F1B and lost them in a later pass, so drawings showed none."""
    assert sum(action is None for action in build("gpipe", 4, 4).rows[0]) == 6


# -- here


def test_two_stages_of_a_rank_that_feed_one_stage_elsewhere_get_a_gradient_each() -> None:
    """Stages 0 and 1 (rank 0) both feed stage 2 (rank 1). The gradient of stage 2 was tracked once on rank 0, so
    verify refused the second receive as `what is there already`, and would have taken the first for both: a
    backward that stood before its own receive passed.
    """
    schedule = build("gpipe", 2, 1, 2, skips=[(0, 2)])
    program = lower(schedule)
    assert "0RECV_B0<-2" in text_of(program, 0)
    assert "1RECV_B0" in text_of(program, 0)
    verify(program)
    row = [action for action in program.rows[0] if str(action) != "0RECV_B0<-2"]
    late = program.replace([[*row, parse("0RECV_B0<-2")], program.rows[1]])
    assert any("0B0: stands before the receive of 2B0" in str(fault) for fault in faults(late))


def test_a_fault_of_one_kind_does_not_hide_those_of_another() -> None:
    """A missing action ended the proof before transfers were looked at: the second run then showed the next fault."""
    program = lower(build("1f1b", 2, 2))
    rows = [
        [action for action in program.rows[0] if str(action) not in ("0B1", "0SEND_F1")],
        [Action(1, Op.F, 8) if str(action) == "1F1" else action for action in program.rows[1]],
    ]
    said = "\n".join(str(fault) for fault in faults(program.replace(rows)))
    for part in ("1F8: microbatch 8 is out of range", "0B1: never runs", "1F1: never runs", "1RECV_F1: has no send"):
        assert part in said


def test_the_critical_path_knows_how_long_a_message_took() -> None:
    """The path was followed by hop alone, so with bandwidth it went to the rank's previous action, which had ended
    long before, and its parts no longer added up.
    """
    timeline = simulate(build("forward-only", 2, 2), Costs(bandwidth=1, bytes=5))
    assert [str(span.action) for span in timeline.critical_path] == ["0F0", "0F1", "1F1"]


def test_a_program_written_by_hand_is_known_to_be_lowered() -> None:
    """Which passes had run was only known for files, so lowering a hand-written program failed with an IndexError."""
    program = Schedule.from_text(["0F0 0SEND_F0", "1RECV_F0 1F0"])
    assert program.passes == {"transfers"}
    assert program.compute().passes == frozenset()


def test_a_backward_in_a_forward_only_schedule_is_refused() -> None:
    """Without backwards due, a stray one was not looked at and passed."""
    schedule = build("forward-only", 2, 1)
    extra = schedule.replace([schedule.rows[0], [*schedule.rows[1], parse("1B0")]])
    assert [str(fault.action) for fault in faults(extra)] == ["1B0"]


def test_a_number_of_thousands_of_digits_is_bad_notation() -> None:
    """Python itself refuses to read such a number, with an error of its own that named no cell."""
    with pytest.raises(NotationError, match="row 1, column 2"):
        Schedule.from_text(f"0F0 0F{'9' * 5000}")


def test_topologies_of_skips_to_one_rank_share_a_message() -> None:
    """A value that two stages of one rank read was once thought of as two messages; its gradients as two as well."""
    net = Topology.chain(4, skips=[(0, 3)])
    program = lower(Schedule.from_text(["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"], topology=net))
    sent = [str(action) for row in program.rows for action in row if action and action.op is Op.SEND_F]
    assert sent == ["0SEND_F0", "2SEND_F0", "1SEND_F0"]
    verify(program)
