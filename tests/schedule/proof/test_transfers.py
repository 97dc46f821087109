"""Which value a transfer moves over which link, and whether both ends of each agree."""

from __future__ import annotations

import pytest

from penstock.schedule import FAMILIES, Action, Schedule, build, faults, lower
from penstock.schedule.dependencies import Table
from penstock.schedule.proof.transfers import Transfers, partner

ONE = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
OTHER = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"


def found(one: str, other: str) -> list[str]:
    """The faults of a program of two ranks, without where its rows then stop."""
    program = Schedule.from_text([one, other], microbatches=2)
    return [str(fault) for fault in faults(program) if "stops here" not in fault.message and not fault.cycle]


def test_a_program_whose_ends_agree_has_no_fault() -> None:
    assert found(ONE, OTHER) == []


@pytest.mark.parametrize("text", ["0SEND_F1", "2RECV_B0", "1RECV_F0"])
def test_the_other_end_of_the_other_end_is_the_transfer_itself(text: str) -> None:
    action = Action.parse(text)
    assert partner(action) != action
    assert partner(partner(action)) == action


@pytest.mark.parametrize("name", FAMILIES)
def test_every_send_of_a_family_is_received_on_its_own_link(name: str) -> None:
    program = lower(build(name, 3, 4))
    transfers = Transfers(program, Table(program.placement, program.topology, program.microbatches))
    assert len(transfers.strays) == 0
    assert transfers.sends.message.tolist() == transfers.receives.message.tolist()
    for number, way in zip(transfers.sends.number.tolist(), transfers.sends.way.tolist(), strict=True):
        rank, _, action = program.place(number)
        ends = {program.placement.rank_of(action.stage), program.placement.rank_of(partner(action).stage)}
        assert rank == transfers.ways[way][0]
        assert set(transfers.ways[way]) == ends


def test_messages_in_two_orders_are_a_fault_that_names_both() -> None:
    swapped = OTHER.replace("1RECV_F0 1F0 1RECV_F1 1F1", "1RECV_F1 1RECV_F0 1F0 1F1")
    (first, second) = found(ONE, swapped)
    assert "0SEND_F0: is message 0 from rank 0 to rank 1, but the receive posted for that message is 1RECV_F1" in first
    assert "0SEND_F1: is message 1 from rank 0 to rank 1, but the receive posted for that message is 1RECV_F0" in second
    assert first.endswith("the two orders differ")


def test_an_end_without_the_other_is_named_with_what_is_missing() -> None:
    without_receive = found(ONE, OTHER.replace("1RECV_F1 ", ""))
    assert any("0SEND_F1: has no receive 1RECV_F1 on rank 1" in fault for fault in without_receive)
    without_send = found(ONE.replace("0SEND_F1 ", ""), OTHER)
    assert any("1RECV_F1: has no send 0SEND_F1 on rank 0" in fault for fault in without_send)


def test_a_message_that_is_sent_twice_is_a_fault_of_its_second_end() -> None:
    twice = ONE.replace("0SEND_F1", "0SEND_F1 0SEND_F1")
    assert any("rank 0, position 4, 0SEND_F1: is there twice on this link" in fault for fault in found(twice, OTHER))
