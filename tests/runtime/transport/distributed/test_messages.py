"""The header of a message over gloo: what it says, in bytes and in words, and the tags of what follows it."""

from __future__ import annotations

import torch

from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.messages import (
    DATA,
    LAYOUTS,
    MAGIC,
    SUBTAGS,
    ExpectedLayouts,
    Header,
    describe,
    read_header,
)
from penstock.runtime.transport.layout.layout import Layout, flatten
from penstock.runtime.transport.layout.tensor_places import HEADER_BYTES

SAID = Header(MAGIC, DATA, 7, 1 << 40, 12, 3, 5, ord("B"), 2, 1, 9)


def test_a_header_is_read_as_it_was_written() -> None:
    written = ExpectedLayouts(Channel(2, 1, "B", 0, 1), 0).header(DATA, 7, 1 << 40, 12, 3, 5, 9)
    assert len(written) == HEADER_BYTES
    assert read_header(written) == SAID


def test_it_says_which_message_it_is() -> None:
    words = describe(SAID)
    assert "microbatch 5, number 3 after 12 exchanges" in words
    assert str(Channel(2, 1, "B", -1, -1)) in words


def test_foreign_bytes_are_called_so() -> None:
    assert describe(SAID._replace(magic=0x1234)) == (
        "something that is no message of Penstock (it begins with 0x00001234)"
    )


def test_what_follows_a_frame_never_has_the_tag_of_frames_nor_of_another_channel() -> None:
    expected = ExpectedLayouts(Channel(0, 1, "F", 0, 1), 3 * SUBTAGS)
    tags = {expected.following_tag(ordinal) for ordinal in range(2 * SUBTAGS)}
    assert tags == set(range(3 * SUBTAGS + 1, 4 * SUBTAGS))


def test_layouts_on_a_device_are_remembered_up_to_a_number_and_others_not_at_all() -> None:
    """Both ends forget at the same one; a layout with numbers in its frame could not be used without its size."""
    expected = ExpectedLayouts(Channel(0, 1, "F", 0, 1), 0)
    in_the_frame = Layout.of(flatten(torch.ones(3)), True)
    expected.learn(in_the_frame)
    assert not expected.knows(in_the_frame)
    made = []
    for size in range(1, LAYOUTS + 2):
        content = Layout.of(flatten(torch.empty(size)), True).content
        made.append(
            Layout(content._replace(slots=tuple(slot and slot._replace(device="cuda") for slot in content.slots)))
        )
        expected.learn(made[-1])
        if size == LAYOUTS:
            assert all(map(expected.knows, made))
    assert [expected.knows(layout) for layout in (made[0], made[-2], made[-1])] == [False, False, True]
