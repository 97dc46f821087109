"""A slow and simple run of a schedule on symbols, for `verify` to be judged by.

It shares nothing with `verify`: ranks take turns, each action really moves symbols between
stores, and the result is compared with what one device would have computed. A value that
arrives under a wrong name, a gradient that is missing, a rank that never ends: all show up as
a different result, without any rule about orders, links or positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from penstock.schedule import Action, Op, Schedule

# ("output" or "gradient", stage, microbatch); of a gradient that was sent, also for which producing stage
Name = tuple[str | int, ...]
Symbol = tuple[Hashable, ...]


class WrongError(Exception):
    """The program does something that changes what is computed."""


def still_right(schedule: Schedule) -> bool:
    """Does it end, with every value and gradient that one device would have computed?"""
    try:
        return _Machine(schedule).run()
    except WrongError:
        return False


class _Machine:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        ops = {part.op for _, _, part in schedule.parts()}
        self.lowered = "transfers" in schedule.passes or any(op.is_transfer for op in ops)
        self.sharded = "shards" in schedule.passes or bool(ops & {Op.UNSHARD, Op.RESHARD})
        self.reducing = "reductions" in schedule.passes or Op.REDUCE_GRAD in ops
        everywhere: dict[Name, Symbol] = {}
        self.stores = [{} if self.lowered else everywhere for _ in schedule.rows]
        self.posted: dict[tuple[int, int], deque[list[Name]]] = {}
        self.weights: dict[tuple[int, int], Symbol] = {}
        self.reduced: set[int] = set()
        self.whole: set[int] = set()

    def run(self) -> bool:
        todo = [deque(part for entry in row if entry for part in entry.parts()) for row in self.schedule.rows]
        going = True
        while going:
            going = False
            for rank, actions in enumerate(todo):
                while actions and self.step(rank, actions[0]):
                    actions.popleft()
                    going = True
        return not any(todo) and not any(self.posted.values()) and self.all_right()

    def step(self, rank: int, action: Action) -> bool:
        """Run one action, or say that it must wait."""
        where = self.schedule.placement.by_stage
        if action.stage >= len(where) or where[action.stage] != rank:
            raise WrongError
        if action.microbatch is not None and action.microbatch >= self.schedule.microbatches:
            raise WrongError
        if action.op.is_transfer:
            return self.transfer(rank, action)
        if action.op in (Op.UNSHARD, Op.RESHARD):
            if (action.op is Op.UNSHARD) == (action.stage in self.whole):
                raise WrongError
            self.whole ^= {action.stage}
            return True
        if self.sharded and action.stage not in self.whole:
            raise WrongError
        return self.reduce(action.stage) if action.op is Op.REDUCE_GRAD else self.compute(rank, action)

    def compute(self, rank: int, action: Action) -> bool:
        stage, op, microbatch = action.stage, action.op, action.microbatch
        store, topology = self.stores[rank], self.schedule.topology
        wanted: list[Name]
        own: Name = ("gradient", stage, microbatch)
        if op is Op.F:
            wanted = [("output", producer, microbatch) for producer in topology.producers(stage)]
        elif op is Op.W:
            wanted = [own]
        else:
            wanted = [("output", stage, microbatch)]
            for consumer in topology.consumers(stage):
                sent = self.lowered and self.schedule.placement.by_stage[consumer] != rank
                wanted.append(("gradient", consumer, microbatch, stage) if sent else ("gradient", consumer, microbatch))
        if any(name not in store for name in wanted):
            return False
        if op is Op.F:
            self.keep(rank, ("output", stage, microbatch), ("F", stage, microbatch, *(store[name] for name in wanted)))
        elif op is not Op.W:
            self.keep(rank, own, ("I", stage, microbatch, *(_share(name, store[name], stage) for name in wanted)))
        if op in (Op.B, Op.W):
            if (stage, microbatch) in self.weights or stage in self.reduced:
                raise WrongError
            self.weights[stage, microbatch] = store[own]
        return True

    def keep(self, rank: int, name: Name, symbol: Symbol) -> None:
        if name in self.stores[rank]:
            raise WrongError
        self.stores[rank][name] = symbol

    def transfer(self, rank: int, action: Action) -> bool:
        """A receive is posted and goes on; a send waits for the next receive that is posted on its link."""
        far, microbatch = action.other_end, action.microbatch
        forwards = action.op in (Op.SEND_F, Op.RECV_F)
        sends = action.op in (Op.SEND_F, Op.SEND_B)
        source, target = sorted((action.stage, far))
        readers = self.schedule.topology.consumers(source) if far in range(self.schedule.stages) else ()
        where = self.schedule.placement.by_stage
        readers = tuple(reader for reader in readers if where[reader] == where[target])
        if target not in readers[:1] or where[far] == rank or (action.stage == source) != (forwards == sends):
            raise WrongError
        names: list[Name] = (
            [("output", source, microbatch)] if forwards else [("gradient", one, microbatch) for one in readers]
        )
        if not sends:
            arriving: list[Name] = names if forwards else [(*name, source) for name in names]
            self.posted.setdefault((where[far], rank), deque()).append(arriving)
            return True
        posted = self.posted.get((rank, where[far]))
        if not posted or any(name not in self.stores[rank] for name in names):
            return False
        meant = posted.popleft()
        if len(meant) != len(names):
            raise WrongError
        for there, here in zip(meant, names, strict=True):
            self.keep(where[far], there, _share(here, self.stores[rank][here], source))
        return True

    def reduce(self, stage: int) -> bool:
        summed = sum(1 for done, _ in self.weights if done == stage)
        if stage in self.reduced or summed != self.schedule.microbatches:
            raise WrongError
        self.reduced.add(stage)
        return True

    def all_right(self) -> bool:
        """Compare with one device: each stage after the other, each microbatch by itself."""
        topology, forward_only = self.schedule.topology, self.schedule.forward_only
        right: dict[Name, Symbol] = {}
        stages, microbatches = range(self.schedule.stages), range(self.schedule.microbatches)
        for m in microbatches:
            for s in stages:
                inputs = [right["output", producer, m] for producer in topology.producers(s)]
                right["output", s, m] = ("F", s, m, *inputs)
            for s in () if forward_only else reversed(stages):
                for consumer in topology.consumers(s):
                    name = ("gradient", consumer, m)
                    right[*name, s] = _share(name, right[name], s)
                gradients = [right["gradient", consumer, m, s] for consumer in topology.consumers(s)]
                right["gradient", s, m] = ("I", s, m, right["output", s, m], *gradients)
        computed: dict[Name, Symbol] = {}
        for store in self.stores:
            if any(right.get(name) != symbol for name, symbol in store.items()):
                return False
            computed |= store
        weights = {} if forward_only else {(s, m): right["gradient", s, m] for s in stages for m in microbatches}
        reduced = set(stages) if self.reducing and not forward_only else set()
        computed |= {name: symbol for name, symbol in right.items() if len(name) == 4}  # handed over on one rank
        return computed == right and self.weights == weights and self.reduced == reduced and not self.whole


def _share(name: Name, symbol: Symbol, producer: int) -> Symbol:
    """A gradient's part for one producing stage, which is another tensor than the next one's; outputs are one."""
    return ("share", producer, symbol) if name[0] == "gradient" and len(name) == 3 else symbol
