"""The 64 bytes in front of every message.

A message says what it is, so that the receiver can prove that it is the due one before it takes
a byte as data: which channel, step and microbatch, the how-manieth of its channel in this step,
and the checksum of the layout that the sender went by.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.layout.tensor_places import HEADER_BYTES

MAGIC = 0x50454E53  # "PENS"
DATA = 1  # looks as predicted: the bytes are in this frame and in the direct messages before it
CHANGED = 2  # looks different: a layout and all bytes follow in one message
FAILURE = 3  # there is no value: the reason follows, as plain values

HEADER = struct.Struct("<IIIQQIIIii16x")
assert HEADER.size == HEADER_BYTES


class Header(NamedTuple):
    magic: int
    kind: int
    checksum: int  # of the layout
    follows: int  # bytes of the next message that belongs to this one
    step: int
    ordinal: int
    microbatch: int
    direction: int
    source_stage: int
    target_stage: int


def raw_header(frame: Tensor) -> bytes:
    """The first bytes of a frame that has come, by ctypes: torch's own ways cost four times as much."""
    return ctypes.string_at(frame.data_ptr(), HEADER_BYTES)


def read_header(raw: bytes) -> Header:
    return Header._make(HEADER.unpack(raw))


def blank_header() -> tuple[Tensor, Any]:
    """A frame of a header only, and the buffer to write it by."""
    frame = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    return frame, (ctypes.c_char * HEADER_BYTES).from_address(frame.data_ptr())


def describe(header: Header) -> str:
    """A header in words, for an error."""
    if header.magic != MAGIC:
        return f"something that is no message of Penstock (it begins with {header.magic:#010x})"
    channel = Channel(header.source_stage, header.target_stage, "F" if header.direction == ord("F") else "B", -1, -1)
    return f"{channel}, microbatch {header.microbatch}, number {header.ordinal} of step {header.step}"
