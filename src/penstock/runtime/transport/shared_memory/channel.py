"""The ends of channels between ranks on one host.

A message may be sent when fewer than `ahead` messages of its channel are under way beyond those whose
receives are posted. The receiver counts its posts in words that the sender can read, so that costs neither
of them a call, and a sender waits for nothing but posts: that is less than the proof of a program allows
(there a send ends only when its very receive is posted). Blocks never make a sender wait: where all are in
use another is made, and where memory is refused the message takes the long way.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from penstock.runtime.transport.base import Channel
from penstock.runtime.transport.gloo.links import Links
from penstock.runtime.transport.layout.layout import Layout, flatten
from penstock.runtime.transport.shared_memory.blocks import allocate, map_memory
from penstock.runtime.transport.shared_memory.connection import NUDGE, Filed, Gone, Pair

__all__ = ["NearIn", "NearLinks", "NearOut"]

RECENT = 4  # layouts that a channel tries, after the one of that place in the last step, before it makes a new one
_NUDGED = 0  # the first word: the sender sleeps until another receive is posted


class NearIn:
    """The receiving end of one channel."""

    def __init__(self, edge: Channel, pair: Pair, key: int, words: memoryview, place: int) -> None:
        self.edge = edge
        self.pair = pair
        self.queue = pair.queues[key]
        self.count = 0  # taken off the queue in this step
        self.due: deque[int] = deque()  # microbatches posted and not yet come
        self.came: dict[int, Filed] = {}  # come before they were asked for
        self._words = words
        self._place = place
        self._posted = 0

    def post(self, microbatch: int) -> None:
        """One more may come."""
        self.due.append(microbatch)
        self._posted += 1
        words = self._words
        words[self._place] = self._posted
        if words[_NUDGED]:
            words[_NUDGED] = 0
            self.pair.say(NUDGE)


class NearOut:
    """The sending end of one channel."""

    def __init__(self, edge: Channel, pair: Pair, key: int, program: int, place: int, ahead: int) -> None:
        self.edge = edge
        self.pair = pair
        self.key = key
        self.count = 0  # sent in this step
        self.total = 0
        self._program = program
        self._place = place
        self._ahead = self.allowed = ahead
        self._known: dict[int, tuple[int, Layout]] = {}  # by place in the step: what was sent there last
        self._recent: deque[tuple[int, Layout]] = deque(maxlen=RECENT)
        pair.kept += [self._known, self._recent]

    def may_send(self) -> bool:
        """Whether the receiver has posted enough; asks for a nudge if not."""
        words = self.pair.posts.get(self._program)
        if words is None:
            return False  # it has yet to come
        self.allowed = words[self._place] + self._ahead
        if self.total >= self.allowed:
            words[_NUDGED] = 1
            self.allowed = words[self._place] + self._ahead
        return self.total < self.allowed

    def match(self, value: Any) -> tuple[int, Layout, Sequence[Any]]:
        """The layout of the value, known to the peer by a number, and the value's leaves."""
        known = self._known.get(self.count)
        if known is not None:
            leaves = known[1].fits(value)
            if leaves is not None:
                return *known, leaves
        for known in self._recent:
            leaves = known[1].fits(value)
            if leaves is not None:
                self._known[self.count] = known
                return *known, leaves
        taken = flatten(value)
        known = self.pair.introduce(Layout.of(taken, False).all_packed())
        self._known[self.count] = known
        self._recent.appendleft(known)
        return *known, taken.items


class NearLinks(Links):
    """All ends that live on one rank: the near ones, and far ones for the rest and for what takes the long way."""

    def __init__(self, channels: Sequence[Channel], rank: int, tag: int, pairs: Mapping[int, Pair], ahead: int) -> None:
        super().__init__(channels, rank, tag)
        self.near_ins: dict[int, NearIn] = {}
        self.near_outs: dict[int, NearOut] = {}
        words: dict[int, memoryview] = {}
        for index, edge in enumerate(channels):
            key = self.program << 16 | index
            if edge.target_rank == rank and edge.source_rank in pairs:
                peer = edge.source_rank
                if peer not in words:
                    words[peer] = _share_words(pairs[peer], self.program, len(channels) + 1)
                self.near_ins[index] = NearIn(edge, pairs[peer], key, words[peer], index + 1)
            elif edge.source_rank == rank and edge.target_rank in pairs:
                pair = pairs[edge.target_rank]
                self.near_outs[index] = NearOut(edge, pair, key, self.program, index + 1, ahead)

    def counts(self) -> tuple[dict[int, int], dict[int, int]]:
        sent, taken = super().counts()
        sent.update({index: link.count for index, link in self.near_outs.items() if link.count})
        taken.update({index: link.count - len(link.came) for index, link in self.near_ins.items() if link.count})
        return sent, taken

    def end_step(self) -> None:
        super().end_step()
        for came in self.near_ins.values():
            came.count = 0
        for sent in self.near_outs.values():
            sent.count = 0

    def check_idle(self, call: str) -> None:
        super().check_idle(call)
        for link in self.near_ins.values():
            self._check_idle(call, link.edge, (*link.due, *link.came))


def _share_words(pair: Pair, program: int, count: int) -> memoryview:
    descriptor = allocate(count * 8)
    try:
        with suppress(Gone):  # it has left; what it sent before is still to be read
            pair.share_posts(program, descriptor)
        return map_memory(descriptor).cast("Q")
    finally:
        os.close(descriptor)
