"""The seam that all transports share: the call that a rank is in, and a broken group."""

from __future__ import annotations

import pytest

from penstock.errors import PeerFailure
from penstock.runtime.transport import Channel, ThreadTransport


def test_the_outer_call_counts_and_is_over_when_it_raises() -> None:
    transport = ThreadTransport.group(1)[0]
    with transport.calling("step()"):
        with pytest.raises(ZeroDivisionError), transport.calling("grad_norm()"):
            _ = 1 / len(transport.call.removeprefix("step()"))  # it is in step(), so that nothing is left
        assert transport.call == "step()"
    assert transport.call == ""


def test_on_a_broken_group_a_failure_is_not_sent_and_a_message_is_the_loss() -> None:
    first, second = ThreadTransport.group(2)
    channel = Channel(0, 1, "F", 0, 1)
    for transport in (first, second):
        transport.open([channel])
    lost = PeerFailure(1, "gone")
    first.abort(lost)
    first.send_failure(0, 0, PeerFailure(0, "its own"))  # nobody would take it
    assert second.discard(0, 0) is second.broken
    with pytest.raises(PeerFailure, match="gone"):
        first.send(0, 0, None)
