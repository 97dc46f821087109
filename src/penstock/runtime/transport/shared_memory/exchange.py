"""The exchange that ends a step, by the sockets of ranks on one host: a wake-up costs there a tenth of gloo's.

Which way it goes between two ranks is what both know alike: whether they have a connection. They all have none
before the first program is opened, and after that the coordinator has one to every rank on its host.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MessageError
from penstock.runtime.transport.failure.blame import Waiting
from penstock.runtime.transport.gloo.exchange import Exchange
from penstock.runtime.transport.gloo.operations import Operations
from penstock.runtime.transport.shared_memory.connection import Gone
from penstock.runtime.transport.shared_memory.connections import Pairs

__all__ = ["NearExchange"]

_NOTHING = torch.empty(0, dtype=torch.uint8)


class NearExchange(Exchange):
    """An `Exchange` over sockets, where there are any."""

    def __init__(self, rank: int, ranks: int, coordinator: int, tag: int, operations: Operations, pairs: Pairs) -> None:
        super().__init__(rank, ranks, coordinator, tag, operations)
        self._pairs = pairs

    def _post(self, peer: int) -> tuple[Tensor, Any]:
        return (_NOTHING, None) if peer in self._pairs else super()._post(peer)

    def _put(self, peer: int, step: int, body: bytes) -> None:
        pair = self._pairs.get(peer)
        if pair is None:
            super()._put(peer, step, body)
            return
        self._pairs.busy_with = None, -1
        try:
            pair.write_letter(step, body)
        except Gone:
            self._pairs.lose(Waiting(peer, None, -1, monotonic()))

    def _get(self, peer: int, step: int, frame: Tensor, work: Any) -> bytes:
        pair = self._pairs.get(peer)
        if pair is None:
            return super()._get(peer, step, frame, work)
        if not pair.letters:
            self._pairs.wait(pair, None, -1, pair.letters.__len__)
        its_step, body = pair.letters.popleft()
        if its_step != step:
            raise MessageError(self._other_step(peer, step, its_step))
        return body
