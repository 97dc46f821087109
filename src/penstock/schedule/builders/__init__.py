"""The families of schedules, by name.

A builder is a pure function from whole numbers to each rank's compute order; it works for
every number of ranks and microbatches. `build` finds it by name, and turns its order into an
aligned `Schedule`. Families that are defined for one stage a rank run several as a block:
neighbouring stages on one rank, one after the other, exactly as if they were one stage.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.errors import UsageError
from penstock.rules import check_count
from penstock.schedule.action import Action, Op, trusted
from penstock.schedule.builders import dualpipe, fill_drain, one_f_one_b, v, zero_bubble
from penstock.schedule.lowering.align import align
from penstock.schedule.lowering.lower import lower
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.topology import Topology

__all__ = ["FAMILIES", "Family", "build", "family", "forward_program"]

Order = list[list[Action]]


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
    """

    name: str
    order: Callable[..., Order]
    layout: str  # "block", "loop" or "v": where a rank's stages are
    summary: str
    aliases: tuple[str, ...] = ()
    stages_per_rank: int = 1  # unless the user says otherwise

    @property
    def placed(self) -> Callable[[int, int], Placement]:
        """The function from (ranks, stages per rank) to the placement."""
        return {"block": Placement.block, "loop": Placement.loop, "v": Placement.v}[self.layout]


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
        ),
        Family("zb-h1", zero_bubble.zb_h1, "block", "zero bubble in 1F1B's memory", ("ZB1P", "zb1", "ZeroBubbleH1")),
        Family("zb-h2", zero_bubble.zb_h2, "block", "zero bubble in up to twice 1F1B's memory", ("ZB2P", "zb2")),
        Family(
            "interleaved-zb",
            zero_bubble.interleaved_zb,
            "loop",
            "interleaved, with weight gradients in the bubbles",
            ("InterleavedZeroBubble",),
            2,
        ),
        Family("zb-v", v.zb_v, "v", "V placement: 1F1B's memory at zero bubble", ("ZBVZeroBubble", "ZBV"), 2),
        Family("v-half", v.v_half, "v", "V placement: half of 1F1B's memory", ("VHalf",), 2),
        Family("v-min", v.v_min, "v", "V placement: about a third of 1F1B's memory", ("VMin",), 2),
        Family("dualpipe-v", dualpipe.dualpipe_v, "v", "V placement with overlapped pairs", ("DualPipeV",), 2),
        Family("forward-only", fill_drain.forward_only, "loop", "inference", ("ForwardOnly", "eval", "inference")),
    )
}


AUTO = "auto"  # searched, not built


def _plain(name: str) -> str:
    """How names are compared: no case, no hyphens; torch's class names are taken too."""
    if not isinstance(name, str):
        raise UsageError(
            f"a schedule is named by text, such as '1f1b' (known: {', '.join([*FAMILIES, AUTO])}); got {name!r}"
        )
    return name.lower().replace("-", "").replace("_", "").replace(" ", "").removeprefix("schedule")


_BY_NAME = {_plain(name): entry for entry in FAMILIES.values() for name in (entry.name, *entry.aliases)}


def is_auto(name: str) -> bool:
    """Is "auto" meant, which `build` searches for?"""
    return _plain(name) == AUTO


def family(name: str) -> Family:
    """The family of that name, in any case, or under one of its usual aliases.

    Args:
        name: The name, such as `"zb-v"` or `"Interleaved1F1B"`.
    """
    found = _BY_NAME.get(_plain(name))
    if found is None and is_auto(name):
        raise UsageError(
            "auto is not a family: it is searched for, under costs and a memory cap; call "
            "penstock.schedule.search(ranks, microbatches, costs, memory), or penstock search"
        )
    if found is None:
        near = difflib.get_close_matches(_plain(name), _BY_NAME, n=1, cutoff=0.5)
        hint = f"; did you mean {_BY_NAME[near[0]].name}?" if near else ""
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

    Returns:
        A `Schedule` with idle slots where a rank waits.
    """
    if overlap_b_f and (is_auto(name) or family(name).name != "interleaved-1f1b"):
        raise UsageError(f"overlap_b_f=True makes pairs in interleaved-1f1b, not in {name}; leave it out")
    if is_auto(name):
        return _searched(ranks, microbatches, stages_per_rank, skips)
    entry = family(name)
    if stages_per_rank is None:
        stages_per_rank = entry.stages_per_rank
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        check_count(what, value)
    if entry.layout == "v" and stages_per_rank != 2:
        raise UsageError(
            f"{entry.name} has 2 stages on each rank, one on the way down the V and one on the way up; "
            f"got stages_per_rank={stages_per_rank} (interleaved-zb takes any number)"
        )
    placement = entry.placed(ranks, stages_per_rank)
    if entry.layout == "loop":
        order = entry.order(ranks, microbatches, stages_per_rank)
    else:
        order = entry.order(ranks, microbatches)
        if entry.layout == "block" and stages_per_rank > 1:
            order = [_in_blocks(row, stages_per_rank) for row in order]
    if overlap_b_f:
        order = [one_f_one_b.overlap_b_f(row) for row in order]
    return align(
        Schedule(
            order,
            placement=placement,
            microbatches=microbatches,
            topology=Topology.chain(placement.stages, skips),
            forward_only=entry.name == "forward-only",
            name=entry.name,
            passes=(),
        )
    )


def _searched(ranks: int, microbatches: int, stages_per_rank: int | None, skips: Iterable[tuple[int, int]]) -> Schedule:
    from penstock.schedule.search import search  # which looks at every family here

    sizes = (1, 2, 3, 4) if stages_per_rank is None else stages_per_rank
    found = search(ranks, microbatches, memory=ranks, stages_per_rank=sizes, seconds=0)
    # what skips stages is there before what comes through them, so an order for the chain is one for the skips too
    topology = Topology.chain(found.stages, skips)
    return found if found.topology == topology else align(found.replace(topology=topology))


def forward_program(schedule: Schedule, microbatches: int) -> Schedule:
    """The lowered inference program for the same stages on the same ranks, breadth first."""
    order = [
        [
            trusted(stage, Op.F, microbatch)
            for stage in schedule.placement.stages_of(rank)
            for microbatch in range(microbatches)
        ]
        for rank in range(schedule.ranks)
    ]
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
    """Each action on stage s becomes the same on stages s*size ... s*size+size-1, in model order."""
    blocks = []
    for stage, op, microbatch, _, _ in row:
        block = range(stage * size, (stage + 1) * size)
        blocks += [trusted(part, op, microbatch) for part in (block if op is Op.F else reversed(block))]
    return blocks
