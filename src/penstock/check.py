"""A user's own check: does the pipeline compute what the plain model computes?

Both sides get a copy of the model with equal weights and run the same microbatches for two
steps, with the same random numbers: one as a plain loop of gradient accumulation over the
stages in one thread, the other through the pipeline. Losses, every stage's output, every
parameter's gradient of every microbatch and all buffers are compared. On a mismatch the
error names the first stage, microbatch and tensor where the two part, because that is
where to look.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ParityError
from penstock.model.split import OUTPUT, Split, split_model
from penstock.pipeline import Pipeline
from penstock.runtime.losses import ExtraLosses, check_loss, loss_shares
from penstock.runtime.microbatch import Batch, split_batch
from penstock.runtime.randomness import randomness
from penstock.schedule import Op

__all__ = ["Parity", "parity"]

STEPS = 2


@dataclass(frozen=True)
class Parity:
    """What was compared, and how far apart it was at the most (0 is bit for bit)."""

    loss: float
    gradient: float
    buffer: float
    compared: int

    @property
    def exact(self) -> bool:
        """Every number is the same, bit for bit."""
        return self.loss == self.gradient == self.buffer == 0.0


@dataclass
class _Trace:
    """What one side computed: tensors by (step, stage, microbatch, name)."""

    outputs: dict[tuple[int, int, int], list[Tensor]] = field(default_factory=dict)
    gradients: dict[tuple[int, int, str], list[Tensor]] = field(default_factory=dict)
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    buffers: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)


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

    `tolerance` is relative; by default 0 where the schedule runs each stage's backwards in the
    order of microbatches, so that sums are taken in the same order, and a few roundings where
    it does not. The model itself is not touched. Ranks are threads.
    """
    options = dict(pipeline)
    with Pipeline(copy.deepcopy(model), **options, transport="threads") as pipe:
        plain = split_model(
            copy.deepcopy(model), options.get("stages"), options.get("balance"), options.get("skips", ())
        )
        batch = split_batch(pipe.microbatches, args, kwargs, target, loss_kwargs or {}, pipe.batch_dims)
        expected = _run_plain(pipe, plain, batch)
        found = _run_pipeline(pipe, args, kwargs, target, loss_kwargs)
        return _compare(pipe, expected, found, tolerance)


def _run_plain(pipe: Pipeline, split: Split, batch: Batch) -> _Trace:
    trace = _Trace()
    shares = loss_shares(batch, pipe.loss_reduction, pipe.loss_weight)
    count = pipe.microbatches
    for part in split.parts:
        part.module.train(pipe.split.parts[part.index].module.training)
    for step in range(STEPS):
        hooks = [hook for part in split.parts for hook in _watch_gradients(trace, step, part.index, part.module)]
        trace.losses[step] = []
        for number in range(count):
            payloads: dict[tuple[int, int], Any] = {}
            extra: list[Tensor] = []
            for part in split.parts:
                arrived = {stage: payloads[stage, part.index] for stage in split.topology.producers(part.index)}
                with randomness(pipe.clock.seed, step, number, part.index), ExtraLosses() as collected:
                    emitted = part.run(arrived, batch.args[number], batch.kwargs[number])
                    if OUTPUT in emitted:
                        loss = _loss(pipe, batch, number, emitted[OUTPUT])
                extra += [value for _, value in collected.found]
                trace.outputs[step, part.index, number] = _tensors(emitted)
                payloads.update({(part.index, reader): payload for reader, payload in emitted.items()})
            roots = [(loss, shares[number]), *((value, 1.0 / count) for value in extra)]
            roots = [(root, seed) for root, seed in roots if root.requires_grad]
            torch.autograd.backward([root for root, _ in roots], [torch.tensor(seed).to(root) for root, seed in roots])
            trace.losses[step].append(loss.detach())
        _keep_buffers(trace, step, split)
        for hook in hooks:
            hook.remove()
    return trace


def _loss(pipe: Pipeline, batch: Batch, number: int, output: Any) -> Tensor:
    if pipe.loss_fn is None:
        return check_loss(output)
    return check_loss(pipe.loss_fn(output, batch.targets[number], **batch.loss_kwargs[number]))


def _run_pipeline(
    pipe: Pipeline, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, loss_kwargs: Mapping[str, Any] | None
) -> _Trace:
    trace = _Trace()
    for step in range(STEPS):
        hooks: list[Any] = []
        for part in pipe.split.parts:
            hooks += _watch_gradients(trace, step, part.index, part.module)
        undo = [_watch_outputs(trace, pipe, step, index) for index in range(pipe.split.stages)]
        try:
            result = pipe.step(*args, target=target, loss_kwargs=loss_kwargs, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            for restore in undo:
                restore()
        trace.losses[step] = list(result.losses)
        _keep_buffers(trace, step, pipe.split)
    return trace


def _watch_outputs(trace: _Trace, pipe: Pipeline, step: int, index: int) -> Any:
    """Keep what a stage emits; its forwards run in the order of its row."""
    part = pipe.split.parts[index]
    order = [action.microbatch for _, _, action in pipe.schedule.parts() if action.stage == index and action.op is Op.F]
    run, calls = part.run, iter(order)

    def watched(*inputs: Any) -> dict[int, Any]:
        emitted = run(*inputs)
        number = next(calls, None)  # a recomputed forward comes after all first ones, or is told by repetition
        if number is not None and (step, index, number) not in trace.outputs:
            trace.outputs[step, index, number] = _tensors(emitted)
        return emitted

    if pipe.recompute == "never":
        part.run = watched  # type: ignore[method-assign, assignment]
    return lambda: part.__dict__.pop("run", None)


def _watch_gradients(trace: _Trace, step: int, index: int, module: nn.Module) -> list[Any]:
    hooks = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            kept = trace.gradients.setdefault((step, index, name), [])

            def keep(tensor: Tensor, kept: list[Tensor] = kept) -> None:
                if tensor.grad is not None:
                    kept.append(tensor.grad.detach().clone())

            hooks.append(parameter.register_post_accumulate_grad_hook(keep))  # type: ignore[no-untyped-call]
    return hooks


def _keep_buffers(trace: _Trace, step: int, split: Split) -> None:
    for part in split.parts:
        for name, buffer in part.module.named_buffers():
            trace.buffers[step, part.index, name] = buffer.detach().clone()


def _tensors(emitted: Mapping[int, Any]) -> list[Tensor]:
    return [
        leaf.detach().clone()
        for target in sorted(emitted)
        for leaf in pytree.tree_leaves(emitted[target])
        if isinstance(leaf, Tensor)
    ]


def _compare(pipe: Pipeline, expected: _Trace, found: _Trace, tolerance: float | None) -> Parity:
    worst = {"loss": 0.0, "gradient": 0.0, "buffer": 0.0}
    compared = 0
    for key, tensors in found.outputs.items():
        step, stage, number = key
        for place, (want, have) in enumerate(zip(expected.outputs[key], tensors, strict=True)):
            where = f"step {step}, stage {stage}, microbatch {number}, output tensor {place}"
            _near(where, want, have, tolerance or 0.0)
            compared += 1
    for step, losses in expected.losses.items():
        for number, (want, have) in enumerate(zip(losses, found.losses[step], strict=True)):
            where = f"step {step}, stage {pipe.split.stages - 1}, microbatch {number}, the loss"
            worst["loss"] = max(worst["loss"], _near(where, want, have, tolerance or 0.0))
            compared += 1
    for gradient_key, wants in expected.gradients.items():
        step, stage, name = gradient_key
        haves, order = found.gradients[gradient_key], _backward_order(pipe, stage)
        full_name = pipe.split.parts[stage].names[name]
        if len(wants) != len(haves):
            raise ParityError(
                f"step {step}, stage {stage}, {full_name}: its gradient was accumulated {len(haves)} times in the "
                f"pipeline and {len(wants)} times in the plain model"
            )
        same_order = order == sorted(order)
        allowed = tolerance if tolerance is not None else (0.0 if same_order else _roundings(wants))
        pairs = list(zip(order if len(order) == len(wants) else range(len(wants)), wants, haves, strict=True))
        for number, want, have in pairs if same_order else pairs[-1:]:
            where = f"step {step}, stage {stage}, microbatch {number}, gradient of {full_name}"
            worst["gradient"] = max(worst["gradient"], _near(where, want, have, allowed))
            compared += 1
    for buffer_key, want in expected.buffers.items():
        where = f"step {buffer_key[0]}, stage {buffer_key[1]}, buffer {buffer_key[2]}"
        worst["buffer"] = max(worst["buffer"], _near(where, want, found.buffers[buffer_key], tolerance or 0.0))
        compared += 1
    return Parity(worst["loss"], worst["gradient"], worst["buffer"], compared)


def _backward_order(pipe: Pipeline, stage: int) -> list[int]:
    return [
        action.microbatch
        for _, _, action in pipe.schedule.parts()
        if action.stage == stage and action.op in (Op.B, Op.W)
    ]


def _roundings(tensors: Sequence[Tensor]) -> float:
    return 64 * max((torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point()), default=0.0)


def _near(where: str, want: Tensor, have: Tensor, tolerance: float) -> float:
    """How far apart, relative to the largest entry; an error where that is too far."""
    if want.shape != have.shape or want.dtype != have.dtype:
        raise ParityError(
            f"{where}: the pipeline has {have.dtype} of shape {tuple(have.shape)}, the plain model "
            f"{want.dtype} of shape {tuple(want.shape)}"
        )
    if torch.equal(want, have):
        return 0.0
    scale = max(want.abs().max().item(), 1e-30)
    distance = (have.to(torch.float64) - want.to(torch.float64)).abs().max().item() / scale
    if not distance <= tolerance:
        raise ParityError(
            f"{where}: the pipeline and the plain model differ by {distance:.3g} of its largest entry "
            f"(allowed: {tolerance:.3g})"
        )
    return distance
