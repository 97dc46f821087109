"""The receiving end of a channel over gloo: a message cannot point outside itself, and receives come in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transport_harness import run, values

from penstock.errors import MessageError
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.incoming import AHEAD, AHEAD_BYTES, AHEAD_LEFT, DistributedIncoming
from penstock.runtime.transport.distributed.messages import CHANGED, HEADER, MAGIC, Header
from penstock.runtime.transport.layout.layout import Book


def test_a_changed_message_cannot_point_outside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    end = DistributedIncoming(Channel(0, 1, "F", 0, 1), 0, None, None, Book(), None)  # type: ignore[arg-type]
    for told in (0, 65, 1 << 40):
        raw = HEADER.pack(MAGIC, CHANGED, 0, told, 0, 0, 0, 0, 0, 1, 0)
        body = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        header = Header(MAGIC, CHANGED, 0, HEADER.size, 0, 0, 0, 0, 0, 1, 0)
        monkeypatch.setattr(end, "_follow", lambda *_, body=body: body)
        with pytest.raises(MessageError, match=rf"a message of 64 bytes says that {told} of them are its layout"):
            end._take_changed(0, header, lambda *_: None)


PAIR = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]
MESSAGES = 40
assert AHEAD < MESSAGES


def post_after_expecting(transport: Any) -> list[list[int]]:
    """How many receives gloo has after the announcement and after each post, in steps of small and large messages."""
    transport.open(PAIR)
    seen = []
    end = transport.ends.receiving(0) if transport.rank == 1 else transport.ends.sending(0)
    backend = end._connection.backend

    class Counting:
        receives = 0

        def send(self, *arguments: Any) -> Any:
            return backend.send(*arguments)

        def recv(self, *arguments: Any) -> Any:
            self.receives += arguments[2] == end._expected.tag
            return backend.recv(*arguments)

    small, large = torch.ones(3, 5), torch.ones(AHEAD_BYTES)
    steps = ((small, 0), (small, MESSAGES), (large, MESSAGES), (large, MESSAGES), (small, 0), (small, 3))
    for value, announced in steps:
        counting = Counting()
        end._connection = end._connection._replace(backend=counting)
        counts = []
        if transport.rank == 0:
            for microbatch in range(MESSAGES):
                transport.send(0, microbatch, value * microbatch)
        else:
            end.expect(announced)
            counts.append(counting.receives)
            for microbatch in range(MESSAGES):
                transport.post(0, microbatch)
                counts.append(counting.receives)
                assert torch.equal(transport.receive(0, microbatch), value * microbatch)
        transport.flush()
        transport.exchange(None)
        seen.append(counts)
    return seen


def test_announced_receives_are_with_gloo_early_and_several_at_a_time_and_never_one_too_many() -> None:
    new, small, changed, large, back, few = values(run("distributed", post_after_expecting))[1]
    each = list(range(MESSAGES + 1))
    assert new == each  # nothing was announced
    assert large == back == [2 * posted for posted in each]  # too large to be held early; a frame and its end
    ahead = [with_gloo - posted for posted, with_gloo in enumerate(small)]
    assert ahead[0] == AHEAD
    assert min(ahead[:-AHEAD]) >= AHEAD_LEFT
    assert small[-1] == changed[-1] == MESSAGES
    assert len(set(small)) < MESSAGES / (AHEAD - AHEAD_LEFT) + 2  # in so many goes
    assert few == [3, 3, 3, *each[3:]]  # what was announced; the rest as it is posted
