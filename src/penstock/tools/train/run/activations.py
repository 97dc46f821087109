"""What the passes of a step take in memory on each rank of a pipeline, beside weights, found out without these passes.

One microbatch is run through all stages, on one rank here, and what each compute allocates and frees is counted: once
where gradients are made, and once where they are added to. Then each rank's actions are gone through in the order of
the schedule: a forward keeps something until its backward has ended, a first backward leaves gradients, and while an
action computes it needs more for a moment.

Between processes a stage holds what it was sent, and not what it has sent away; on one rank both are one tensor. So
what arrives is counted with the stage that it arrives at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.model.lazy import Init
from penstock.pipeline import Pipeline
from penstock.schedule import Action, Op, Schedule
from penstock.tools.train.build import build_model, build_pipeline
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.data.layouts import split_of
from penstock.tools.train.loss import shares_of
from penstock.tools.train.run.allocations import COMPUTES, Allocations, Arrivals, StepPeaks

PASSES = 3  # The last pass is counted: in the first, a stage learns what its `W` can defer.


class RunKind(NamedTuple):
    """How a microbatch may be run in a schedule."""

    split: bool  # The backward comes as I and W.
    recomputed: bool


class ComputeBytes(NamedTuple):
    """What an action does to the memory."""

    change: int  # more that is held when it has ended
    rise: int  # Bytes more, at most, while it runs.


class MeasuredBytes(NamedTuple):
    """One microbatch of a kind: its computes by op and stage, and its messages by maker and taker."""

    computes: dict[tuple[Op, int], ComputeBytes]
    messages: dict[tuple[int, int], int]
    firsts: dict[tuple[Op, int], ComputeBytes]  # the computes where there are no gradients yet


def measure_peaks(
    config: TrainConfig, schedule: Schedule, balance: Any, batch: DataBatch, values: Init
) -> list[StepPeaks] | None:
    """Measure the peak on each rank of `schedule`, whose stages are cut by `balance`; None while somebody profiles."""
    if not Allocations.can_count():
        return None
    kinds = kinds_of_runs(config, schedule)
    found = {
        kind: _measure(config, schedule.stages, kind, balance, batch, values) for kind in sorted(set(kinds.values()))
    }
    ways = {place: found[kind] for place, kind in kinds.items()}
    return [peaks_of(row, ways, config.training.accumulate) for row in schedule.rows]


def _computes(row: Sequence[Action | None]) -> Iterator[Action]:
    return (part for action in row if action is not None for part in action.parts() if part.op in COMPUTES)


def kinds_of_runs(config: TrainConfig, schedule: Schedule) -> dict[tuple[int, int], RunKind]:
    """Return how each microbatch runs, by stage and microbatch."""
    actions = [action for row in schedule.rows for action in _computes(row)]
    split = {(action.stage, action.microbatch) for action in actions if action.op is Op.I}
    last = schedule.microbatches - 1
    recomputed = {"never": 0, "except_last": last, "always": last + 1}[config.pipeline.recompute]
    return {
        (stage, number): RunKind((stage, number) in split, number < recomputed or stage in schedule.recompute)
        for stage, number in {(action.stage, action.microbatch) for action in actions}
    }


def _measure(
    config: TrainConfig, stages: int, kind: RunKind, balance: Any, batch: DataBatch, values: Init
) -> MeasuredBytes:
    """Run the largest microbatch of a batch through all stages."""
    backward = ("I", "W") if kind.split else ("B",)
    row = [f"{stage}F0" for stage in range(stages)]
    row += [f"{stage}{op}0" for stage in reversed(range(stages)) for op in backward]
    recompute: Any = "always" if kind.recomputed else "never"
    alone = replace(config.pipeline, microbatches=1, ranks=1, stages=stages, recompute=recompute)
    largest = largest_microbatch(config, batch)
    model, loss = build_model(config)
    with build_pipeline(
        replace(config, pipeline=alone, data=replace(config.data, max_tokens=None)),  # The batch is cut already.
        model,
        loss,
        largest,
        ranks=1,
        balance=balance,
        schedule=Schedule([row]),
        transport="threads",
        values=values,
    ) as pipe:
        return _run(pipe, largest)


def largest_microbatch(config: TrainConfig, batch: DataBatch) -> DataBatch:
    """Return the microbatch of a batch with most tokens; cut by rows, all have as many, up to one row."""
    microbatches, by_tokens = config.pipeline.microbatches, split_of(config.data).split
    plan = None if by_tokens is None else by_tokens.plan(batch.args, batch.kwargs, microbatches, fixed=False)

    if plan is None:
        return batch.with_rows(lambda tensor: tensor[: -(-len(tensor) // microbatches)])
    number = plan.tokens.index(max(plan.tokens))
    return batch.with_rows(lambda tensor: tensor[plan.index[number], : plan.widths[number]])


def _run(pipe: Pipeline, batch: DataBatch) -> MeasuredBytes:
    (share,) = shares_of(pipe.loss_fn, [batch.target])
    arrivals = Arrivals(pipe)

    def computes(passes: int) -> dict[tuple[Op, int], ComputeBytes]:
        with arrivals, Allocations() as memory:
            for _ in range(passes):
                pipe.step(*batch.args, target=batch.target, loss_kwargs=share, **batch.kwargs)
        return {
            (action.op, action.stage): ComputeBytes(*memory.within(begin, end))
            for action, (begin, end) in memory.actions.items()
        }

    usual = computes(PASSES)
    pipe.zero_grad()
    firsts = computes(1)
    messages = {(maker, action.stage): size for (action, maker), size in arrivals.sizes.items() if action.op is Op.F}
    return MeasuredBytes(usual, messages, firsts)


def peaks_of(row: Sequence[Action | None], ways: dict[tuple[int, int], MeasuredBytes], passes: int = 1) -> StepPeaks:
    """Return the most that a rank holds while it goes through its actions, in passes that add up their gradients.

    A pass that finds gradients keeps a copy of them until it has ended well.
    """
    held = alone = together = gradients = copied = 0
    kept: dict[tuple[int, int], int] = {}
    made: set[tuple[Op, int]] = set()  # computes that find gradients to add to
    for number, action in [each for _ in range(min(passes, 2)) for each in enumerate(_computes(row))]:
        copied = copied if number else gradients
        op, stage, place = action.op, action.stage, (action.stage, action.microbatch)
        computes, messages, firsts = ways[place]
        change, rise = computes[op, stage]
        arrives = sum(size for (_, taker), size in messages.items() if taker == stage)
        sent = sum(size for (maker, _), size in messages.items() if maker == stage)
        before = kept.get(place, 0)
        if op is Op.F:
            new, kept[place] = arrives, max(0, change - sent + arrives)
        elif op is Op.I:
            new, kept[place] = sent, max(0, before + change - arrives)
        else:
            new, kept[place] = sent if op is Op.B else 0, 0
        first = (computes if op is Op.F or (op, stage) in made else firsts)[op, stage]
        alone = max(alone, held + copied + new + rise)
        together = max(together, held + gradients + copied + new + first.rise)
        gradients += first.change - change
        held += kept[place] - before
        if op is not Op.F:
            made |= {(each, stage) for each in ((op,) if op is Op.I else (Op.B, Op.I, Op.W))}
    return StepPeaks(float(alone), float(together))
