"""What `verify` proves of the order in which transfers share a stream is the order in which ranks post them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.runtime.transport.threads import ThreadIncoming, ThreadOutgoing
from penstock.schedule import Op, lower


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved-1f1b"])
def test_ranks_post_their_transfers_in_the_order_of_the_program(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: dict[int, list[str]] = defaultdict(list)
    post, send = ThreadIncoming.post, ThreadOutgoing.send

    def noted_post(end: Any, microbatch: int) -> None:
        posted[end.channel.target_rank].append(end.channel.receive_action(microbatch))
        post(end, microbatch)

    def noted_send(end: Any, microbatch: int) -> None:
        posted[end.channel.source_rank].append(end.channel.send_action(microbatch))
        send(end, microbatch)

    monkeypatch.setattr(ThreadIncoming, "post", noted_post)
    monkeypatch.setattr(ThreadOutgoing, "send", noted_send)
    stages = [nn.Linear(4, 4) for _ in range(2 if schedule == "1f1b" else 4)]
    with penstock.Pipeline(stages, ranks=2, microbatches=4, schedule=schedule, loss_fn=F.mse_loss) as pipe:
        program = lower(pipe.schedule)
        for _ in range(2):  # the second step knows what to expect
            posted.clear()
            pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
            for rank in range(2):
                row = program.rank(rank)
                assert posted[rank] == [str(each) for each in row if each and Op.SEND_F <= each.op <= Op.RECV_B]
