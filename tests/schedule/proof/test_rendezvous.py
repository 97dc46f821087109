"""A program is proved for a kind of link: what shares a stream waits for its turn there."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import pytest
from schedule.proof.mutants import mutants
from schedule.proof.streams import ends
from tiers import in_tiers, mostly_slow, tiers

from penstock.errors import UsageError
from penstock.schedule import FAMILIES, Action, Op, Schedule, build, faults, lower, verify
from penstock.schedule.repeated import repeated

KINDS = ("direction", "pair", "rank")


def only_waits(schedule: Schedule) -> bool:
    """Whether there is nothing wrong with a program, but that it may not end."""
    return all("stops here" in fault.message or "deadlock" in fault.message for fault in faults(schedule))


def judged(program: Schedule) -> dict[str, bool]:
    """Whether the program ends, by kind of link; the proof and the run agree on each."""
    found = {kind: not faults(program, links=kind) for kind in KINDS}
    assert found == {kind: ends(program, kind) for kind in KINDS}, program
    assert found["direction"] >= found["pair"] >= found["rank"], "what shares less has fewer waits"
    for kind, proved in found.items():
        if proved:
            assert ends(program, kind, ahead=True), "a host that runs ahead of its device has fewer waits"
    return found


SIZES = in_tiers(
    [(ranks, microbatches) for ranks in (2, 3, 4, 8) for microbatches in range(1, 17)],
    [(2, 1), (2, 3), (3, 2), (4, 8)],
    [(ranks, microbatches) for ranks in (2, 3, 4, 8) for microbatches in range(1, 17)],
)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_our_programs_end_with_a_stream_for_each_direction(ranks: int, microbatches: int) -> None:
    """And most with fewer streams do not: both ends of a pair post a receive before they send."""
    found = {name: judged(lower(build(name, ranks, microbatches))) for name in FAMILIES}
    assert all(by_kind["direction"] for by_kind in found.values())
    assert all(by_kind["pair"] for by_kind in found.values() if by_kind["rank"])
    assert all(found["gpipe"].values()), "there is nothing to wait for on the way back"
    if microbatches > 2:
        assert not found["1f1b"]["pair"]
        assert sum(by_kind["pair"] for by_kind in found.values()) < len(FAMILIES) / 2


ORDERS = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-v", "dualpipe-v"]


@pytest.mark.parametrize("name", mostly_slow(ORDERS, "1f1b", "zb-v"))
def test_mutants_and_the_run_agree_for_each_kind(name: str) -> None:
    """Transfers that trade places, in programs that are otherwise right, with skips and without."""
    seen: Counter[tuple[str, bool]] = Counter()
    dice = random.Random(name)
    for ranks, microbatches, skips in product((2, 3), (1, 3), ((), ((0, 2),))):
        if skips and (ranks == 2 and FAMILIES[name].layout == "block"):
            continue
        program = lower(build(name, ranks, microbatches, skips=skips))
        for mutant in mutants(program, dice, per_kind=15):
            if mutant.kind == "swap" and only_waits(mutant.schedule):
                seen += Counter(judged(mutant.schedule).items())
    assert seen["direction", True]
    assert seen["pair", False], seen


def shuffled(program: Schedule, dice: random.Random) -> Schedule:
    """The program with receives that are posted earlier and sends that come later; each link keeps its order."""
    rows = [[action for action in row if action is not None] for row in program.rows]
    for row in rows:
        for _ in range(dice.randrange(2 * len(row))):
            at = dice.randrange(len(row) - 1)
            first, second = row[at : at + 2]
            moves = second.op in (Op.RECV_F, Op.RECV_B) or first.op in (Op.SEND_F, Op.SEND_B)
            both = first.op.is_transfer and second.op.is_transfer
            if moves and not (both and way(program, first) == way(program, second)):
                row[at : at + 2] = second, first
    return program.replace(rows)


def way(program: Schedule, action: Action) -> tuple[bool, int]:
    return action.op in (Op.SEND_F, Op.SEND_B), program.placement.rank_of(action.other_end)


@pytest.mark.parametrize("count", [40, *tiers(400, 3000)])
def test_shuffled_transfers_and_the_run_agree_for_each_kind(count: int) -> None:
    dice, seen = random.Random(count), Counter[tuple[str, bool]]()
    while min(seen[kind, True] + seen[kind, False] for kind in KINDS) < count:
        name = dice.choice(sorted(FAMILIES))
        program = shuffled(lower(build(name, dice.randint(2, 4), dice.randint(1, 4))), dice)
        if only_waits(program):
            seen += Counter(judged(program).items())
    assert all(seen[kind, end] for kind, end in product(KINDS, (True, False))), seen


def test_steps_back_to_back_are_proved_for_the_kind_of_link() -> None:
    dice, seen = random.Random(5), Counter[tuple[str, bool]]()
    for turn in range(60):
        program = lower(build(("gpipe", "1f1b")[turn % 2], 2, 2))
        program = program if turn < 2 else shuffled(program, dice)
        for kind in KINDS:
            if not faults(program, links=kind):
                found = not faults(program, steps=2, links=kind)
                assert found == ends(repeated(program, 2), kind)
                seen[kind, found] += 1
    assert all(seen[kind, True] for kind in KINDS), seen


def text(found: list[object]) -> list[str]:
    return [str(fault) for fault in found]


def test_a_cycle_names_the_streams() -> None:
    program = lower(build("1f1b", 2, 3))
    assert text([*faults(program, links="pair")]) == [
        "rank 0, position 8, 0SEND_F2: stops here: it waits in the stream of ranks 0 and 1 for 0RECV_B1 before it "
        "(rank 1)",
        "rank 1, position 8, 1SEND_B1: stops here: it waits in the stream of ranks 0 and 1 for 1RECV_F2 before it "
        "(rank 0)",
        "deadlock, each waits for the next: rank 0 -> rank 1 -> rank 0\n"
        "    rank 0 at 0SEND_F2 waits in the stream of ranks 0 and 1 for 0RECV_B1 before it (rank 1)\n"
        "    rank 1 at 1SEND_B1 waits in the stream of ranks 0 and 1 for 1RECV_F2 before it (rank 0)",
    ]
    cycle = faults(program, links="pair")[-1].cycle
    assert cycle is not None
    assert [(each.rank, each.position, str(each.action)) for each in cycle] == [(0, 8, "0SEND_F2"), (1, 8, "1SEND_B1")]
    assert "waits in the stream of rank 1 for" in text([*faults(program, links="rank")])[-1]


def test_a_stream_for_each_pair_may_do_where_one_for_each_rank_does_not() -> None:
    """Rank 1 posts the receive from rank 2 before it sends to rank 0, which rank 2's receive waits for in turn."""
    found = [
        (ranks, microbatches)
        for ranks, microbatches in product((3, 4), range(1, 5))
        if (by_kind := judged(lower(build("looped-bfs", ranks, microbatches))))["pair"] and not by_kind["rank"]
    ]
    assert found


def test_a_kind_that_there_is_not_is_refused() -> None:
    program = lower(build("1f1b", 2, 2))
    for call in (verify, faults):
        with pytest.raises(UsageError, match="links='edge': choose one of 'direction', 'pair', 'rank'"):
            call(program, links="edge")


def test_where_there_are_no_transfers_the_kind_does_not_matter() -> None:
    for schedule in (build("1f1b", 3, 4), lower(build("gpipe", 1, 3)), Schedule.from_text("0F0 0B0")):
        assert all(not faults(schedule, links=kind) for kind in KINDS)
