"""The families of schedules, by name.

A builder is a pure function from whole numbers to each rank's compute order; it works for
every number of ranks and microbatches. `build` finds it by name, and turns its order into an
aligned `Schedule`. Families that are defined for one stage per rank run several as a block:
neighbouring stages on one rank, one after the other, exactly as if they were one stage.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import UsageError
from penstock.rules import check_count
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.builders import dualpipe, fill_drain, one_f_one_b, v, zero_bubble
from penstock.schedule.columns import Columns, check_size
from penstock.schedule.lowering.align import align
from penstock.schedule.lowering.lower import lower
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs, given_costs
from penstock.schedule.topology import Topology
from penstock.tool import tool

Order = Iterable[list[Action]]


@dataclass(frozen=True)
class Family:
    """A named recipe for schedules: one entry of `FAMILIES`.

    Attributes:
        name: The name, such as `"zb-v"`.
        order: The function that gives each rank's order of actions.
        layout: Where a rank's stages are: `"block"`, `"loop"` or `"v"`; see `Placement`.
        summary: What it is, in a few words.
        aliases: Other names, as other libraries use them.
        stages_per_rank: The number of stages per rank unless another one is asked for.
        cap: The most activations that a rank may hold, as a function of (ranks, stages per rank), where `build(costs=)`
            shall make an order for the costs.
        drafts: Whether `order` takes `weights=False`, for a caller that places W itself.
        as_one_stage: The family that has the same order where each rank has one stage, if there is one.
        trains: Whether it has a backward.
    """

    name: str
    order: Callable[..., Order]
    layout: str
    summary: str
    aliases: tuple[str, ...] = ()
    stages_per_rank: int = 1
    cap: Callable[[int, int], int] | None = None
    drafts: bool = False
    as_one_stage: str | None = None
    trains: bool = True

    @property
    def placed(self) -> Callable[[int, int], Placement]:
        """The function from (ranks, stages per rank) to the placement."""
        return {"block": Placement.block, "loop": Placement.loop, "v": Placement.v}[self.layout]

    def rows(self, ranks: int, microbatches: int, stages_per_rank: int, **options: bool) -> Order:
        """Build each rank's order; where a rank has a block of stages, the order of the blocks.

        Args:
            ranks: Number of ranks.
            microbatches: Number of microbatches.
            stages_per_rank: Number of stages per rank, for a family that loops.
            **options: Options of the function `order`.
        """
        return self.order(*(ranks, microbatches, stages_per_rank)[: 3 if self.layout == "loop" else 2], **options)

    @cached_property
    def has_full_backwards(self) -> bool:
        """Whether it has backwards that are not split into I and W, alone or in pairs."""
        return any(part.op is Op.B for row in self._small_order for part in row)

    @cached_property
    def runs_forwards_first(self) -> bool:
        """Whether every rank runs all its forwards before its first backward."""
        ops = [[part.op for part in row] for row in self._small_order]
        return all(Op.F not in row[row.count(Op.F) :] for row in ops)

    @property
    def _small_order(self) -> list[list[Action]]:
        order = self.rows(2, 4, self.stages_per_rank)
        return [[part for action in row for part in action.parts()] for row in order]


FAMILIES: dict[str, Family] = {
    entry.name: entry
    for entry in (
        Family("gpipe", fill_drain.gpipe, "block", "fill, drain; all forwards then all backwards"),
        Family("1f1b", one_f_one_b.one_f_one_b, "block", "one forward, one backward after a short warm-up"),
        Family(
            "looped-bfs", fill_drain.looped_bfs, "loop", "several stages per rank, breadth first", ("LoopedBFS",), 2
        ),
        Family(
            "interleaved-1f1b",
            one_f_one_b.interleaved_1f1b,
            "loop",
            "several stages per rank, depth first",
            ("Interleaved1F1B", "FlexibleInterleaved1F1B", "interleaved"),
            2,
            as_one_stage="1f1b",
        ),
        Family(
            "zb-h1",
            zero_bubble.zb_h1,
            "block",
            "zero bubble in 1F1B's memory",
            ("ZB1P", "zb1", "ZeroBubbleH1"),
            cap=lambda ranks, _: ranks,
            drafts=True,
        ),
        Family(
            "zb-h2",
            zero_bubble.zb_h2,
            "block",
            "zero bubble in up to twice 1F1B's memory",
            ("ZB2P", "zb2"),
            cap=lambda ranks, _: 2 * ranks - 1,
            drafts=True,
        ),
        Family(
            "interleaved-zb",
            zero_bubble.interleaved_zb,
            "loop",
            "interleaved, with weight gradients in the bubbles",
            ("InterleavedZeroBubble",),
            2,
            cap=lambda ranks, stages_per_rank: ranks * stages_per_rank,
            drafts=True,
            as_one_stage="zb-h1",
        ),
        Family(
            "group-interleaved",
            zero_bubble.group_interleaved,
            "loop",
            "interleaved in groups of half the ranks: five to six eighths of 1F1B's memory",
            ("GroupInterleaved", "grouped"),
            2,
            cap=zero_bubble.group_cap,
            drafts=True,
        ),
        Family(
            "zb-v",
            v.zb_v,
            "v",
            "V placement: 1F1B's memory at zero bubble",
            ("ZBVZeroBubble", "ZBV"),
            2,
            cap=lambda ranks, _: 2 * ranks,
            drafts=True,
        ),
        Family("v-half", v.v_half, "v", "V placement: half of 1F1B's memory", ("VHalf",), 2, cap=v.half_cap),
        Family("v-min", v.v_min, "v", "V placement: about a third of 1F1B's memory", ("VMin",), 2, cap=v.min_cap),
        Family("dualpipe-v", dualpipe.dualpipe_v, "v", "V placement with overlapped pairs", ("DualPipeV",), 2),
        Family(
            "forward-only",
            fill_drain.forward_only,
            "loop",
            "inference",
            ("ForwardOnly", "eval", "inference"),
            trains=False,
        ),
    )
}

TRAINING = tuple(name for name, entry in FAMILIES.items() if entry.trains)


AUTO = "auto"  # searched, not built


def _plain(name: str) -> str:
    """Return a name as names are compared: no case, no hyphens; torch's class names are taken too."""
    if not isinstance(name, str):
        raise UsageError(
            f"a schedule is named by text, such as '1f1b' (known: {', '.join([*FAMILIES, AUTO])}); got {name!r}"
        )
    return name.lower().replace("-", "").replace("_", "").replace(" ", "").removeprefix("schedule")


BY_NAME = {_plain(name): entry for entry in FAMILIES.values() for name in (entry.name, *entry.aliases)}


def is_auto(name: str) -> bool:
    """Return whether "auto" is meant, which `build` searches for."""
    return _plain(name) == AUTO


def family(name: str) -> Family:
    """Return the family of that name, in any case, or under one of its usual aliases.

    Args:
        name: The name, such as `"zb-v"` or `"Interleaved1F1B"`.
    """
    found = BY_NAME.get(_plain(name))
    if found is None and is_auto(name):
        raise UsageError(
            "auto is not a family: it is searched for, under costs and a memory cap; call "
            "penstock.schedule.search(ranks, microbatches, costs, memory), or penstock search"
        )
    if found is None:
        near = difflib.get_close_matches(_plain(name), BY_NAME, n=1, cutoff=0.5)
        hint = f"; did you mean {BY_NAME[near[0]].name}?" if near else ""
        raise UsageError(f"there is no schedule {name!r}{hint} (known: {', '.join([*FAMILIES, AUTO])})")
    return found


def build(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    *,
    skips: Iterable[tuple[int, int]] = (),
    overlap_b_f: bool = False,
    costs: Costs | None = None,
) -> Schedule:
    """Build the schedule of a family, for any number of ranks, microbatches and stages per rank.

    Args:
        name: The family, in any case; or `"auto"`, what a short search finds for equal costs within 1F1B's memory.
        ranks: Number of ranks.
        microbatches: Number of microbatches.
        stages_per_rank: Number of stages per rank. By default, what the family is defined for.
        skips: Edges (from stage, to stage) that the model has in addition to the chain.
        overlap_b_f: In interleaved-1f1b, make each backward and the forward after it a pair, which a handler may run
            at the same time.
        costs: Costs of one stage, as `simulate` takes them. The zero-bubble families (those with a
            `cap`) then order their actions for these costs, within the memory of the family; the others
            have one order whatever things cost. For `"auto"`, costs of a whole rank, as `search` takes them.

    Returns:
        A `Schedule` with idle slots where a rank waits.
    """
    if overlap_b_f and (is_auto(name) or family(name).name != "interleaved-1f1b"):
        raise UsageError(f"overlap_b_f=True makes pairs in interleaved-1f1b, not in {name}; leave it out")
    given_costs(costs)
    if is_auto(name):
        return _searched(ranks, microbatches, stages_per_rank, skips, costs)
    entry = family(name)
    if stages_per_rank is None:
        stages_per_rank = entry.stages_per_rank
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        check_count(what, value)
    check_size(ranks, microbatches, stages_per_rank)
    if entry.layout == "v" and stages_per_rank != 2:
        raise UsageError(
            f"{entry.name} has 2 stages on each rank, one on the way down the V and one on the way up; "
            f"got stages_per_rank={stages_per_rank} (interleaved-zb takes any number)"
        )
    placement = entry.placed(ranks, stages_per_rank)
    order = entry.rows(ranks, microbatches, stages_per_rank)
    if costs is not None and entry.cap is not None:
        order = _tuned(entry, order, ranks, microbatches, stages_per_rank, costs)
    if entry.layout == "block" and stages_per_rank > 1:
        order = [_in_blocks(row, stages_per_rank) for row in order]
    if overlap_b_f:
        order = [one_f_one_b.overlap_b_f(row) for row in order]
    return align(
        Schedule(
            Columns.of(order),
            placement=placement,
            microbatches=microbatches,
            topology=Topology.chain(placement.stages, skips),
            forward_only=not entry.trains,
            name=entry.name,
            passes=(),
        )
    )


def _searched(
    ranks: int, microbatches: int, stages_per_rank: int | None, skips: Iterable[tuple[int, int]], costs: Costs | None
) -> Schedule:
    check_count("ranks", ranks)
    sizes = (1, 2, 3, 4) if stages_per_rank is None else stages_per_rank
    searching = tool("penstock.tools.search", 'build("auto")')
    memory = searching.memory_of_1f1b(ranks, costs or Costs())
    found: Schedule = searching.search(ranks, microbatches, costs, memory, sizes, seconds=0)
    # what skips stages is there before what comes through them, so an order for the chain is one for the skips too
    topology = Topology.chain(found.stages, skips)
    return found if found.topology == topology else align(found.replace(topology=topology))


def _tuned(
    entry: Family, order: Order, ranks: int, microbatches: int, stages_per_rank: int, costs: Costs
) -> list[list[Action]]:
    """Build the family's order for these costs of one stage."""
    assert entry.cap is not None
    if entry.layout == "block":  # a rank's stages are as one
        costs, stages_per_rank = _of_blocks(costs, ranks, stages_per_rank), 1
    placement, cap = entry.placed(ranks, stages_per_rank), entry.cap(ranks, stages_per_rank)
    tuned = tool("penstock.tools.search.search", "build with costs=").tuned
    rows: list[list[Action]] = tuned(list(order), placement, microbatches, costs, cap)
    return rows


def _of_blocks(costs: Costs, ranks: int, size: int) -> Costs:
    """Return the costs of `size` neighbouring stages as one."""
    stages = ranks * size

    def summed(name: str) -> tuple[float, ...]:
        values = costs.per_stage(name, stages)
        return tuple(sum(values[first : first + size]) for first in range(0, stages, size))

    sent = costs.bytes
    if isinstance(sent, Mapping):
        sent = {(a // size, b // size): number for (a, b), number in sent.items() if a // size != b // size}
    elif isinstance(sent, Sequence):
        sent = sent[size - 1 :: size]
    return replace(costs, forward=summed("forward"), input=summed("input"), weight=summed("weight"), bytes=sent)


def forward_program(schedule: Schedule, microbatches: int) -> Schedule:
    """Build the lowered inference program for the same stages on the same ranks, breadth first."""
    owned = [schedule.placement.stages_of(rank) for rank in range(schedule.ranks)]
    order = [one_f_one_b.in_rounds(stages, Op.F, [microbatches]) for stages in owned]
    return lower(
        Schedule(
            order,
            placement=schedule.placement,
            topology=schedule.topology,
            microbatches=microbatches,
            forward_only=True,
            name="forward-only",
        )
    )


def _in_blocks(row: list[Action], size: int) -> list[Action]:
    """Repeat each action on stage s as the same on stages s*size ... s*size+size-1, in model order."""
    blocks = []
    for stage, op, microbatch, _, _ in row:
        block = range(stage * size, (stage + 1) * size)
        blocks += [trusted(part, op, microbatch) for part in (block if op is Op.F else reversed(block))]
    return blocks
