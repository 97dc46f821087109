"""The mailbox: a stage cannot tell whether its neighbour is on this rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.runtime.engine.computations import Mailbox
from penstock.runtime.transport import ThreadTransport
from penstock.runtime.transport.channel import channels_of
from penstock.schedule import Action, Placement, Topology


def boxes(by_stage: list[int], skips: Any = ()) -> list[Mailbox]:
    placement = Placement(by_stage)
    topology = Topology.chain(placement.stages, skips)
    group = ThreadTransport.group(placement.ranks, timeout=5)
    found = [Mailbox(rank, placement, topology, transport) for rank, transport in enumerate(group)]
    for box in found:
        box.open()
    return found


def transfer(boxes: list[Mailbox], ranks: tuple[int, int], send: str, receive: str) -> None:
    """The two actions of one message."""
    for rank, text in zip(ranks, (send, receive), strict=True):
        action = Action.parse(text)
        box = boxes[rank]
        channel = box.channel(action)
        if "SEND" in text:
            box.ends.sending(channel).send(action.microbatch)
        else:
            box.ends.receiving(channel).post(action.microbatch)


def test_a_hand_over_on_one_rank_shares_memory_and_not_the_graph() -> None:
    (box,) = boxes([0, 0])
    x = torch.ones(2, requires_grad=True) * 2
    box.put_outputs(0, 0, {1: (x, "side", None)})
    arrived, side, nothing = box.take("F", 1, 0)[0]
    assert arrived.data_ptr() == x.data_ptr()
    assert (arrived.is_leaf, arrived.requires_grad, side, nothing) == (True, True, "side", None)


def test_a_value_for_two_stages_of_a_rank_travels_once() -> None:
    both = boxes([0, 1, 0, 1], [(0, 3)])
    channels, *_ = channels_of(Placement([0, 1, 0, 1]), Topology.chain(4, [(0, 3)]))
    assert sum(channel.source_stage == 0 for channel in channels) == 1
    near, skipping = torch.ones(1), torch.full((1,), 3.0)
    both[0].put_outputs(0, 0, {1: near, 3: skipping})
    transfer(both, (0, 1), "0SEND_F0", "1RECV_F0")
    assert torch.equal(both[1].take("F", 1, 0)[0], near)
    both[1].put_outputs(1, 0, {2: near})
    transfer(both, (1, 0), "1SEND_F0", "2RECV_F0")
    both[0].put_outputs(2, 0, {3: near * 2})
    transfer(both, (0, 1), "2SEND_F0", "3RECV_F0")
    assert {stage: value.item() for stage, value in both[1].take("F", 3, 0).items()} == {0: 3.0, 2: 2.0}


def test_gradients_of_both_stages_come_back_in_one_message() -> None:
    both = boxes([0, 1, 1, 1], [(0, 3)])
    both[1].put_gradients(3, 0, {2: [torch.ones(1)], 0: [torch.full((1,), 5.0)]})
    assert both[1].take("B", 2, 0)[3][0].item() == 1.0
    both[1].put_gradients(1, 0, {0: [None]})
    transfer(both, (1, 0), "1SEND_B0", "0RECV_B0")
    back: dict[int, list[Tensor | None]] = both[0].take("B", 0, 0)
    assert back[1] == [None]
    assert back[3][0] is not None
    assert back[3][0].item() == 5.0


def test_what_is_not_there_is_an_error_with_its_name() -> None:
    (box,) = boxes([0, 0])
    with pytest.raises(RunError, match="stage 1 needs the output of stage 0 for microbatch 2, which is not there"):
        box.take("F", 1, 2)
    with pytest.raises(RunError, match="stage 0 needs the gradient of stage 1 for microbatch 2, which is not there"):
        box.take("B", 0, 2)


def test_pending_lists_receives_that_are_under_way() -> None:
    both = boxes([0, 1])
    box = both[1]
    receive = Action.parse("1RECV_F0")
    box.ends.receiving(box.channel(receive)).post(0)
    assert list(box.ends.pending) == [(box.channel(receive), 0)]
    both[0].put_outputs(0, 0, {1: torch.ones(1)})
    send = Action.parse("0SEND_F0")
    both[0].ends.sending(both[0].channel(send)).send(0)
    box.take("F", 1, 0)
    assert list(box.ends.pending) == []


@pytest.mark.parametrize("by_stage", [[0, 0], [0, 1]])
def test_a_write_between_putting_and_taking_is_seen(by_stage: list[int]) -> None:
    both = boxes(by_stage)
    workspace = torch.ones(2)
    both[0].put_outputs(0, 0, {1: {"value": workspace}})
    if len(both) == 2:
        transfer(both, (0, 1), "0SEND_F0", "1RECV_F0")
    workspace.add_(1)
    with pytest.raises(RunError, match="what stage 0 handed over for microbatch 0 was written to in place before"):
        both[-1].take("F", 1, 0)
