"""A slow and simple run of a program on links that share streams, for the proof to be judged by.

Written from the rules and from nothing of the proof: every rank goes through its row and posts its transfers into
queues, one for each stream; a transfer ends when both of its ends stand at the front of their queues, and then both are
taken out. A rank waits at a send until it has ended, and at a compute until all that it needs has arrived. With
`ahead` it waits for nothing, as the host of a device: computes are then a queue of their own, and a send begins when
the computes before it have run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator

from penstock.schedule import Action, Op, Schedule

Message = tuple[bool, int, int, int | None]  # forward; source stage and rank it goes to, or comes from; microbatch
SENDS = (Op.SEND_F, Op.SEND_B)


def ends(program: Schedule, links: str, ahead: bool = False) -> bool:
    """Whether every rank comes to the end of its row, and every transfer to its own."""
    return _Machine(program, links, ahead).run()


class _Machine:
    def __init__(self, program: Schedule, links: str, ahead: bool) -> None:
        self.program, self.links, self.ahead = program, links, ahead
        self.rank_of = program.placement.rank_of
        self.rows = [[action for action in row if action is not None] for row in program.rows]
        self.at = [0] * program.ranks
        self.queues: list[dict[Hashable, deque[Action]]] = [defaultdict(deque) for _ in self.rows]
        self.posted: set[tuple[int, int]] = set()
        self.arrived: set[Message] = set()
        self.computed = [0] * program.ranks  # with `ahead`: how many computes have run
        self.before: dict[tuple[int, Action], int] = {}  # and how many stand before a send
        self.computes = [[action for action in row if not action.op.is_transfer] for row in self.rows]

    def run(self) -> bool:
        going = True
        while going:
            going = False
            for rank in range(len(self.rows)):
                going |= self.host(rank)
                going |= self.ahead and self.compute(rank)
                going |= self.move(rank)
        through = all(at == len(row) for at, row in zip(self.at, self.rows, strict=True))
        return through and not any(queue for queues in self.queues for queue in queues.values())

    def host(self, rank: int) -> bool:
        """Go on in the row as far as possible."""
        row, begin = self.rows[rank], (self.at[rank], len(self.posted))
        while self.at[rank] < len(row):
            action = row[self.at[rank]]
            if action.op.is_transfer:
                self.post(rank, action)
                if action.op in SENDS and not self.ahead and self.message(action) not in self.arrived:
                    break
            elif not self.ahead and not self.arrived.issuperset(self.needs(rank, action)):
                break
            self.at[rank] += 1
        return (self.at[rank], len(self.posted)) != begin

    def post(self, rank: int, action: Action) -> None:
        if (rank, self.at[rank]) not in self.posted:
            self.posted.add((rank, self.at[rank]))
            self.queues[rank][self.stream(rank, action)].append(action)
            passed = self.rows[rank][: self.at[rank]]
            self.before[rank, action] = sum(not each.op.is_transfer for each in passed)

    def compute(self, rank: int) -> bool:
        """Run the next compute of a device."""
        done = self.computed[rank]
        can = done < len(self.computes[rank]) and self.arrived.issuperset(self.needs(rank, self.computes[rank][done]))
        self.computed[rank] += can
        return can

    def move(self, rank: int) -> bool:
        """End the transfers of this rank that can end."""
        found = False
        for stream, queue in self.queues[rank].items():
            while queue:
                action = queue[0]
                peer = self.rank_of(action.other_end)
                far = self.queues[peer].get(stream)
                if not far or (far[0].op in SENDS) == (action.op in SENDS):
                    break
                if self.message(far[0]) != self.message(action) or self.rank_of(far[0].other_end) != rank:
                    break
                source, sent = (rank, action) if action.op in SENDS else (peer, far[0])
                if self.ahead and self.computed[source] < self.before[source, sent]:
                    break
                self.arrived.add(self.message(action))
                queue.popleft(), far.popleft()
                found = True
        return found

    def stream(self, rank: int, action: Action) -> Hashable:
        peer = self.rank_of(action.other_end)
        if self.links == "rank":
            return "all"
        if self.links == "pair":
            return frozenset((rank, peer))
        return (rank, peer) if action.op in SENDS else (peer, rank)

    def message(self, action: Action) -> Message:
        """The same at both ends."""
        forward, here, there = action.op in (Op.SEND_F, Op.RECV_F), action.stage, action.other_end
        source, target = (here, there) if action.op in (Op.SEND_F, Op.RECV_B) else (there, here)
        return forward, source, self.rank_of(target), action.microbatch

    def needs(self, rank: int, action: Action) -> Iterator[Message]:
        """What has to arrive before a compute."""
        topology = self.program.topology
        for part in action.parts():
            if part.op is Op.F:
                for source in topology.producers(part.stage):
                    if self.rank_of(source) != rank:
                        yield True, source, rank, part.microbatch
            elif part.op in (Op.B, Op.I):
                for reader in topology.consumers(part.stage):
                    if self.rank_of(reader) != rank:
                        yield False, part.stage, self.rank_of(reader), part.microbatch
