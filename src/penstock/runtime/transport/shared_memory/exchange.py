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
from penstock.runtime.transport.shared_memory.connection import Connections, Gone

_NOTHING = torch.empty(0, dtype=torch.uint8)


class SharedExchange(Exchange):
    """An `Exchange` over sockets, where there are any."""

    def __init__(
        self, rank: int, ranks: int, coordinator: int, tag: int, operations: Operations, connections: Connections
    ) -> None:
        super().__init__(rank, ranks, coordinator, tag, operations)
        self._connections = connections

    def _post(self, peer: int) -> tuple[Tensor, Any]:
        return (_NOTHING, None) if peer in self._connections else super()._post(peer)

    def _put(self, peer: int, step: int, body: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            super()._put(peer, step, body)
            return
        self._connections.busy_with = None, -1
        try:
            connection.write_exchange(step, body)
        except Gone:
            self._connections.lose(Waiting(peer, None, -1, monotonic()))

    def _get(self, peer: int, step: int, frame: Tensor, work: Any) -> bytes:
        connection = self._connections.get(peer)
        if connection is None:
            return super()._get(peer, step, frame, work)
        if not connection.exchanges:
            self._connections.wait(connection, None, -1, connection.exchanges.__len__)
        its_step, body = connection.exchanges.popleft()
        if its_step != step:
            raise MessageError(self._other_step(peer, step, its_step))
        return body
