"""A user's own check: does the pipeline compute what the plain model computes?

Both sides get a copy of the model with equal weights and run the same microbatches for two
steps, with the same random numbers: one as a plain loop of gradient accumulation over the
stages in one thread, the other through the pipeline. Compared are, for every microbatch: each
stage's outputs, its buffers, its extra losses, the loss and the gradient that each parameter
gets; and, after each step: the batch's loss, all buffers and the gradients as they have added up.

On a mismatch the error names the first stage, microbatch and tensor where the two part, because
that is where to look. First means upstream: forwards before backwards, and of the backwards the
last stage before those that got their gradients from it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.devices import CPU, to_device
from penstock.errors import ParityError, UsageError
from penstock.model.cut import cut_model
from penstock.model.cut_options import CutOptions
from penstock.model.part import OUTPUT
from penstock.model.staged_model import StagedModel
from penstock.pipeline import Pipeline
from penstock.pipeline.batches import Call
from penstock.pipeline.devices import home_of
from penstock.runtime.backward.saved_graph import FreshGradients
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.microbatch import Batch, plain_example
from penstock.runtime.engine.replication import Replication
from penstock.runtime.loss.losses import check_loss, own_loss
from penstock.runtime.loss.module import module_of
from penstock.runtime.loss.shares import BatchShares
from penstock.runtime.optim.precision import Precision
from penstock.runtime.state.batch_norm import Statistics, prepare_batch_norm
from penstock.runtime.state.phase import Phase
from penstock.runtime.state.randomness import RankGenerators, randomness
from penstock.schedule import Op
from penstock.tools.parity_check.tensor_trace import (
    TensorTrace,
    check_close,
    compare_uncut,
    largest,
    uncut,
    watching_stages,
)

STEPS = 2
CUTS = ("balance", "example", "split_at")  # what says how a model is cut, with cut_options
KINDS = ("output", "buffer", "loss", "gradient", "tied")


@dataclass(frozen=True)
class Parity:
    """The largest differences that `parity` found, relative to a tensor's largest entry; 0 is bit for bit.

    Attributes:
        output: Of the outputs of stages.
        loss: Of losses, extra losses included.
        gradient: Of gradients.
        buffer: Of buffers.
        compared: How many tensors were compared.
    """

    output: float
    loss: float
    gradient: float
    buffer: float
    compared: int

    @property
    def exact(self) -> bool:
        """Every number is the same, bit for bit."""
        return self.output == self.loss == self.gradient == self.buffer == 0.0


def parity(
    model: nn.Module | Sequence[nn.Module],
    *args: Any,
    target: Any = None,
    loss_kwargs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    pipeline: Mapping[str, Any],
    **kwargs: Any,
) -> Parity:
    """Compare `Pipeline(model, **pipeline)` with the plain model on one batch, for two steps.

    The model itself is not changed, and ranks are threads. By default every number must be equal bit for bit, except
    for sums of gradients that the schedule does not add in the order of microbatches, which may differ by rounding.

    Args:
        model: The model, as for `Pipeline`.
        *args: Positional inputs of the model.
        target: What the loss function compares the output with.
        loss_kwargs: Further keyword arguments of the loss function.
        tolerance: The largest difference allowed, relative to the largest entry of a tensor.
        pipeline: The arguments of `Pipeline`, as a dict.
        **kwargs: Keyword inputs of the model.

    Returns:
        A `Parity` with the largest differences found.

    Raises:
        ParityError: The two differ; the message names the first stage, microbatch and tensor where they do.
    """
    _check_arguments(model, pipeline)
    options = {**pipeline, "transport": "threads", "group": None, "mesh": None}
    options.pop("parallel_options", None)  # In one process there is one pipeline.
    cut = {name: pipeline[name] for name in CUTS if name in pipeline}
    cut["example"] = plain_example(cut.get("example"))
    cut["options"] = pipeline.get("cut_options", CutOptions())
    loss_fn = pipeline.get("loss_fn")
    (piped, options["loss_fn"]), (own, own_loss_fn), (single, single_loss_fn) = (
        copy.deepcopy((model, loss_fn)) if module_of(loss_fn) is not None else (copy.deepcopy(model), loss_fn)
        for _ in range(3)
    )
    with Pipeline(piped, **options) as pipe:
        # The plain loop has one device.
        home = pipe.deployment.devices.get(pipe.deployment.placement.rank_of(0))
        for each, its_loss in ((own, own_loss_fn), (single, single_loss_fn)):
            prepare_batch_norm(each, pipe.batches.options.batch_norm)
            for module in (*(each if isinstance(each, Sequence) else [each]), module_of(its_loss)):
                if home is not None and module is not None:
                    module.to(home)
        args, kwargs, target, loss_kwargs = to_device((args, kwargs, target, loss_kwargs or {}), home)
        cut["example"] = to_device(cut["example"], home)
        plain = cut_model(own, pipeline.get("stages"), **cut)
        if plain.recut is not None and plain.cuts != pipe.deployment.staged.cuts:  # the pipeline's placement had a say
            plain = plain.recut(pipe.deployment.staged.cuts)
        batch = pipe.batches.microbatches_of(
            Call("step()", args, kwargs, target, loss_kwargs, outputs=False, training=True)
        )
        expected, found = TensorTrace(plain), TensorTrace(pipe.deployment.staged)
        whole = uncut(plain, single, cut)
        _run_plain(pipe, plain, batch, expected, own_loss_fn)
        if whole is not None:
            alone = TensorTrace(whole)
            _run_plain(pipe, whole, batch, alone, single_loss_fn)
            compare_uncut(plain, expected.summed(), alone.summed(), tolerance)
        for step in range(STEPS):
            with found.watching(step), watching_stages(pipe, found):
                result = pipe.step(*args, target=target, loss_kwargs=loss_kwargs, **kwargs)
            found.keep_step(result.loss)
    return _compare(pipe, expected, found, tolerance)


def _check_arguments(model: Any, pipeline: Any) -> None:
    if isinstance(model, Pipeline) or not isinstance(pipeline, Mapping):
        raise UsageError(
            "parity() makes its own Pipeline: pass the model, and the other arguments as a dict: "
            "parity(model, x, target=y, pipeline={'stages': 2, 'microbatches': 4, 'loss_fn': loss_fn})"
        )
    if pipeline.get("batch_options", BatchOptions()).batch_norm == "exact":
        raise UsageError(
            "parity() goes microbatch by microbatch, and BatchOptions(batch_norm='exact') normalises the batch as a "
            "whole; compare such a pipeline with the plain model on the whole batch"
        )


def _run_plain(pipe: Pipeline, split: StagedModel, batch: Batch, trace: TensorTrace, loss_fn: Any) -> None:
    """Run the plain loop with a loss function of its own, whose parameters and buffers the pipeline does not share."""
    with pipe.deployment.ranks.precise() as precisions:
        _accumulate(pipe, split, batch, trace, precisions[0], loss_fn)


def _accumulate(
    pipe: Pipeline, split: StagedModel, batch: Batch, trace: TensorTrace, precision: Precision | None, loss_fn: Any
) -> None:
    generators = RankGenerators()
    generators.draw_on(home_of(part.module for part in split.parts) or CPU)
    for part in split.parts:
        part.around = generators.unit_stream
    fresh = [FreshGradients(part.module) for part in split.parts]  # Autograd itself does not see to these.
    for step in range(STEPS):
        for each in fresh:
            each.begin_step()
        total: Tensor | None = None
        statistics = Statistics()  # Statistics of batch norms that see each batch once.
        shares = BatchShares(pipe.batches.weighing, batch, Replication(), training=True)
        with trace.watching(step):
            for number in range(pipe.microbatches):
                trace.numbers = [number] * split.stages
                loss, extra = _plain_forward(pipe, split, batch, step, number, trace, precision, statistics, loss_fn)
                shares.read(number, loss, loss)
                found = shares.if_counts(number)
                share = 0.0 if found is None else found[number]
                roots = [(loss, share), *((value, 1.0 / pipe.microbatches) for value in extra)]
                roots = [(root, seed) for root, seed in roots if root.requires_grad and seed]
                seeds = [torch.tensor(seed, dtype=torch.float64, device="cpu").to(root) for root, seed in roots]
                for each in fresh:
                    each.before()
                torch.autograd.backward([root for root, _ in roots], seeds)
                for each in fresh:
                    each.after()
                if share:
                    part_of_loss = loss.detach() * share
                    total = part_of_loss if total is None else total + part_of_loss
        statistics.commit()
        trace.keep_step(total)


def _plain_forward(
    pipe: Pipeline,
    split: StagedModel,
    batch: Batch,
    step: int,
    number: int,
    trace: TensorTrace,
    precision: Precision | None,
    statistics: Statistics,
    loss_fn: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of one microbatch, and all extra losses."""
    payloads: dict[tuple[int, int], Any] = {}
    extra: list[Tensor] = []
    result: Tensor | None = None
    for part in split.parts:
        arrived = {stage: payloads[stage, part.index] for stage in split.topology.producers(part.index)}
        stream = randomness(pipe.deployment.counter.seed, step, number, part.stream)
        phase = Phase("forward", number, statistics)
        with stream, phase, nullcontext() if precision is None else precision():
            emitted = part.run(arrived, batch.args[number], batch.kwargs[number])
            if OUTPUT in emitted:
                result = emitted[OUTPUT]
                if loss_fn is None:
                    result = own_loss(result)
                else:
                    result = loss_fn(result, batch.targets[number], **batch.loss_kwargs[number])
        trace.keep_forward(part.index, number, emitted, None if result is None else check_loss(result), phase.extra)
        extra += [value for _, value in phase.extra]
        payloads.update({(part.index, reader): payload for reader, payload in emitted.items()})
    return check_loss(result), extra


def _compare(pipe: Pipeline, plain: TensorTrace, piped: TensorTrace, tolerance: float | None) -> Parity:
    expected, found = plain.tensors, piped.tensors
    worst = dict.fromkeys(("output", "loss", "gradient", "buffer"), 0.0)
    in_order = [_adds_in_order(pipe, stage) for stage in range(pipe.deployment.staged.stages)]
    scale = largest(tensor for place, tensor in expected.items() if place.kind in ("gradient", "tied"))
    for place in sorted({*expected, *found}, key=lambda each: (*each[:4], KINDS.index(each.kind), each.name)):
        want, have = expected.get(place), found.get(place)
        if want is None or have is None:
            sides = ("pipeline", "plain model") if want is None else ("plain model", "pipeline")
            raise ParityError("{}: the {} has one, the {} has none".format(place, *sides))
        reordered = place.kind == "tied" or (
            place.kind == "gradient"
            and (place.stage <= plain.forks or (place.phase == 2 and not in_order[place.stage]))
        )
        allowed = tolerance if tolerance is not None else 64 * torch.finfo(want.dtype).eps if reordered else 0.0
        kind = "gradient" if place.kind == "tied" else place.kind
        worst[kind] = max(
            worst[kind], check_close(place, want, have.to(want.device), allowed, scale * (kind == "gradient"))
        )
    return Parity(**worst, compared=len(expected))


def _adds_in_order(pipe: Pipeline, stage: int) -> bool:
    """Return whether gradients, which are added in B, or in I and W, are added microbatch by microbatch."""
    actions = [action for _, _, action in pipe.schedule.parts() if action.stage == stage]
    orders = [[action.microbatch for action in actions if action.op in (Op.B, last)] for last in (Op.I, Op.W)]
    return all(order == sorted(order) for order in orders)
