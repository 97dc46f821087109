"""dualpipe-v"""

from __future__ import annotations

from penstock.schedule.action import Action, Op, trusted

__all__ = ["dualpipe_v"]


def dualpipe_v(ranks: int, microbatches: int, offset: int = 0) -> list[list[Action]]:
    enough = max(microbatches, 2 * ranks - 1)
    rows = [_Row(rank, ranks, enough).actions for rank in range(ranks)]
    if microbatches == enough:
        return rows
    return [_keep(row, offset, microbatches) for row in rows]


def _keep(row, first, count):
    kept = []
    for action in row:
        parts = [
            trusted(p.stage, p.op, p.microbatch - first)
            for p in action.parts()
            if first <= p.microbatch < first + count
        ]
        if len(parts) == 2:
            kept.append(Action.overlap(*parts))
        else:
            kept += parts
    return kept


class _Row:
    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.actions: list[Action] = []
        self.counts = {}
        self.owed = []
        down, up = rank, 2 * ranks - 1 - rank
        below = ranks - 1 - rank
        for _ in range(2 * below):
            self.run(down, Op.F)
        for _ in range(rank + 1):
            self.run(down, Op.F)
            self.run(up, Op.F)
        for _ in range(below):
            self.run(up, Op.I)
            self.weight()
            self.run(up, Op.F)
        for i in range(microbatches - 2 * ranks + rank + 1):
            if i == 0 and below == 0:
                self.run(down, Op.F)
                self.run(up, Op.B)
            else:
                self.overlap(down, up)
            self.overlap(up, down)
        for _ in range(below):
            self.run(up, Op.B)
            self.overlap(up, down)
        for i in range(2 * (rank + 1)):
            self.run(down if i % 2 else up, Op.B if i <= rank else Op.I)
        for _ in range(below):
            self.weight()
            self.run(down, Op.I)
        while self.owed:
            self.weight()

    def next(self, stage, op):
        key = (stage, op is Op.F)
        m = self.counts.get(key, 0)
        self.counts[key] = m + 1
        return trusted(stage, op, m)

    def run(self, stage, op):
        a = self.next(stage, op)
        self.actions.append(a)
        if op is Op.I:
            self.owed.append(trusted(stage, Op.W, a.microbatch))

    def weight(self):
        self.actions.append(self.owed.pop(0))

    def overlap(self, f, b):
        self.actions.append(Action.overlap(self.next(f, Op.F), self.next(b, Op.B)))
