"""The receiving end of a channel over gloo: a message cannot point outside itself."""

from __future__ import annotations

import pytest

from penstock.errors import MessageError
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.incoming import DistributedIncoming
from penstock.runtime.transport.distributed.messages import CHANGED, HEADER, MAGIC, Header, blank_header
from penstock.runtime.transport.layout.layout import Book


def test_a_changed_message_cannot_point_outside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    end = DistributedIncoming(Channel(0, 1, "F", 0, 1), 0, None, Book(), None)  # type: ignore[arg-type]
    for told in (0, 65, 1 << 40):
        body, buffer = blank_header()
        HEADER.pack_into(buffer, 0, MAGIC, CHANGED, 0, told, 0, 0, 0, 0, 0, 1)
        header = Header(MAGIC, CHANGED, 0, HEADER.size, 0, 0, 0, 0, 0, 1)
        monkeypatch.setattr(end, "_follow", lambda *_, body=body: body)
        with pytest.raises(MessageError, match=rf"a message of 64 bytes says that {told} of them are its layout"):
            end._take_changed(0, header)
