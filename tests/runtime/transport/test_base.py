"""The seam that all transports share: a broken group."""

from __future__ import annotations

import pytest

from penstock.errors import PeerFailure
from penstock.runtime.transport import Channel, ThreadTransport


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
