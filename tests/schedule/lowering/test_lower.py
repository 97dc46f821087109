"""From a compute schedule to the program that is run."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import (
    FAMILIES,
    Action,
    Op,
    Schedule,
    build,
    insert_reductions,
    insert_shards,
    insert_transfers,
    lower,
    verify,
)
from penstock.schedule.lowering.lower import is_aligned
from penstock.schedule.proof.transfers import partner


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def test_receives_are_posted_ahead_and_results_sent_at_once() -> None:
    assert texts(lower(build("1f1b", 2, 2))) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_the_turn_of_a_v_is_a_hand_over_without_transfers() -> None:
    program = lower(build("zb-v", 2, 1))
    moved = {(part.stage, part.other_end) for _, _, part in program.parts() if part.op.is_transfer}
    assert moved == {(0, 1), (1, 0), (2, 3), (3, 2)}  # not 1 to 2, which both live on rank 1
    assert not any(part.op.is_transfer for _, _, part in lower(build("zb-v", 1, 3)).parts())


def test_a_skip_edge_is_one_message_for_each_value_and_rank() -> None:
    program = lower(build("1f1b", 4, 1, skips=[(0, 3), (0, 2)]))
    assert texts(program)[0] == (
        "0F0 0SEND_F0 0SEND_F0->2 0SEND_F0->3 0RECV_B0<-3 0RECV_B0<-2 0RECV_B0 0B0"
    )  # fmt: skip
    assert "2RECV_F0<-0" in texts(program)[2]
    verify(program)


def test_two_readers_on_one_rank_share_the_message_and_sum_their_gradients() -> None:
    program = lower(build("interleaved-1f1b", 2, 1, 2, skips=[(0, 3)]))
    assert texts(program) == [
        "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0",
    ]
    verify(program)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_links_receives_are_its_sends_in_the_same_order(name: str) -> None:
    program = lower(build(name, 4, 6, skips=[(0, 3), (0, 2)]))
    home = program.placement.by_stage
    sends: dict[tuple[int, int], list[Action]] = {}
    receives: dict[tuple[int, int], list[Action]] = {}
    for rank, _, action in program.parts():
        if action.op in (Op.SEND_F, Op.SEND_B):
            sends.setdefault((rank, home[action.other_end]), []).append(action)
        elif action.op in (Op.RECV_F, Op.RECV_B):
            receives.setdefault((home[action.other_end], rank), []).append(action)
    assert receives == {way: [partner(action) for action in actions] for way, actions in sends.items()}
    assert all(len(set(actions)) == len(actions) for actions in sends.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_receive_is_posted_at_least_one_compute_before_its_use_unless_the_rank_idles(name: str) -> None:
    schedule = build(name, 3, 5)
    for row, slots in zip(lower(schedule).rows, schedule.rows, strict=True):
        at = {part: place for place, action in enumerate(row) if action for part in action.parts()}
        for action in row:
            if action and action.op is Op.RECV_F:
                use = Action(action.stage, Op.F, action.microbatch)
                between = [entry for entry in row[at[action] : at[use]] if entry and not entry.op.is_transfer]
                slot = next(place for place, entry in enumerate(slots) if entry and use in entry.parts())
                assert between or slots[slot - 1] is None


@pytest.mark.parametrize("name", FAMILIES)
def test_lowering_keeps_the_order_of_the_computes(name: str) -> None:
    schedule = build(name, 3, 4)
    assert lower(schedule, reduce=True, window=2).compute() == schedule.compute()


def test_an_order_without_idle_slots_is_aligned_first() -> None:
    schedule = build("interleaved-1f1b", 3, 4)
    assert is_aligned(schedule)
    assert not is_aligned(schedule.compute())
    assert lower(schedule.compute()) == lower(schedule)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        lower(Schedule.from_text(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]))
    with pytest.raises(ScheduleError, match="lives on rank"):
        lower(Schedule.from_text(["0F0 1B0", "1F0 0B0"]))
    with pytest.raises(UsageError, match="lowered already"):
        lower(lower(build("1f1b", 2, 2)))


def test_reductions_follow_the_last_backward_by_order_not_by_number() -> None:
    reduced = insert_reductions(build("looped-bfs", 2, 3, 2).compute())
    assert texts(reduced) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 2REDUCE_GRAD 0B2 0B1 0B0 0REDUCE_GRAD",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 3REDUCE_GRAD 1B2 1B1 1B0 1REDUCE_GRAD",
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_stage_is_reduced_once_and_nothing_of_it_follows(name: str) -> None:
    program = lower(build(name, 3, 5), reduce=True)
    reduced = Counter(part.stage for _, _, part in program.parts() if part.op is Op.REDUCE_GRAD)
    assert reduced == ({} if program.forward_only else dict.fromkeys(range(program.stages), 1))
    for row in program.rows:
        ended: set[int] = set()
        for action in row:
            assert action
            if action.op is Op.REDUCE_GRAD:
                ended.add(action.stage)
            assert not any(part.op in (Op.B, Op.W) and part.stage in ended for part in action.parts())


def test_reductions_see_the_backwards_inside_pairs() -> None:
    reduced = insert_reductions(Schedule.from_text("0F0 (0F1;0B0) 0B1 1F0 1B0 (1F1;1B1)", microbatches=2))
    assert texts(reduced) == ["0F0 (0F1;0B0)OVERLAP_F_B 0B1 0REDUCE_GRAD 1F0 1B0 (1F1;1B1)OVERLAP_F_B 1REDUCE_GRAD"]


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (1, "0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B1 2B0 2RESHARD 0UNSHARD 0B1 0B0 0RESHARD"),
        (2, "0UNSHARD 2UNSHARD 0F0 0F1 2F0 2F1 2B1 2B0 2RESHARD 0B1 0B0 0RESHARD"),
        (3, "0UNSHARD 2UNSHARD 0F0 0F1 2F0 2F1 2B1 2B0 2RESHARD 0B1 0B0 0RESHARD"),
    ],
)
def test_the_window_says_how_many_stages_are_whole(window: int, wanted: str) -> None:
    sharded = insert_shards(build("looped-bfs", 2, 2, 2).compute(), window)
    assert texts(sharded)[0] == wanted


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_never_more_stages_are_whole_than_the_window(name: str, window: int) -> None:
    for row in lower(build(name, 2, 5), reduce=True, window=window).rows:
        whole = most = 0
        pairs = any(action and action.pair for action in row)
        for action in row:
            whole += {Op.UNSHARD: 1, Op.RESHARD: -1}.get(action.op, 0) if action else 0
            most = max(most, whole)
        assert most <= max(window, 2 if pairs else 1)
        assert whole == 0


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="window must be a whole number of at least 1"):
        lower(build("1f1b", 2, 2), window=0)


def test_passes_are_told() -> None:
    schedule = build("1f1b", 2, 2)
    assert insert_transfers(schedule).passes == {"transfers"}
    assert lower(schedule, reduce=True, window=1).passes == {"transfers", "reductions", "shards"}


class CountedRow(tuple[Action | None, ...]):
    """A row that counts how often an entry of it is looked at."""

    looks = 0

    def __iter__(self):  # type: ignore[no-untyped-def]
        for entry in super().__iter__():
            CountedRow.looks += 1
            yield entry

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        CountedRow.looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("step", [insert_reductions, lambda schedule: insert_shards(schedule, 2)])
def test_a_pass_over_rows_looks_at_each_action_a_constant_number_of_times(step: object) -> None:
    assert callable(step)
    looks = []
    for microbatches in (8, 32):
        schedule = build("interleaved-1f1b", 4, microbatches)
        actions = sum(map(len, schedule.rows))
        object.__setattr__(schedule, "rows", tuple(CountedRow(row) for row in schedule.rows))
        CountedRow.looks = 0
        step(schedule)
        assert CountedRow.looks > 0
        looks.append(CountedRow.looks / actions)
    assert looks[1] <= looks[0] * 1.1


@pytest.mark.parametrize("family", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_a_reduction_waits_until_what_its_last_backward_made_has_been_sent(family: str) -> None:
    """Another rank waits for that send; for the reduction nobody does before the end of the step."""
    program = lower(build(family, ranks=3, microbatches=4), reduce=True)
    for row in program.rows:
        actions = [action for action in row if action is not None]
        for place, action in enumerate(actions[:-1]):
            if action.op is Op.REDUCE_GRAD:
                assert not actions[place + 1].op.is_transfer, (str(action), str(actions[place + 1]))
    verify(program)
