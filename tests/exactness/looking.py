"""Stages that report how everything lies in memory that they are given: inputs, and gradients on the way back.

A report holds the strides, the address modulo a cache line and a checksum of the bits: two runs with the same reports
gave their kernels the same to work on, whatever those make of it on any processor.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from exactness.cases import SEED, Case, plain_step
from exactness.models import Example, example
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from penstock.runtime.state.memory_layout import regions


class Seen(NamedTuple):
    """One tensor that a stage was given, or that the training left."""

    where: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    phase: int
    bits: int


SEEN: list[Seen] = []


def note(where: str, tensor: Tensor, rounded: bool = False) -> None:
    """`rounded`: its bits are its own."""
    bits = b"" if rounded else tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    SEEN.append(Seen(where, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % 64, zlib.crc32(bits)))


class Look(torch.autograd.Function):
    """Changes nothing, and notes what comes through, both ways."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, where: str) -> Tensor:
        ctx.where = where
        note(where, tensor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        note(f"gradient of {ctx.where}", gradient)
        return gradient, None


def look(value: Any, where: str, alone: bool = False) -> Any:
    """`alone`: only at tensors that share memory with no other one of the value."""
    leaves, spec = pytree.tree_flatten(value)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for region in regions([leaves[place] for place in places]):
        for place in (places[member] for member in region.members if not alone or len(region.members) == 1):
            leaves[place] = Look.apply(leaves[place], f"{where} {place}")  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(leaves, spec)


class Looking(nn.Module):
    """A stage that looks at what it is given, and at the gradients that come back for what it returns.

    But not for outputs in the same memory: a stage that may write into them gets them as views of one, and their
    gradients come back as one.
    """

    def __init__(self, stage: nn.Module, number: int) -> None:
        super().__init__()
        self.stage, self.number = stage, number

    def forward(self, *args: Any) -> Any:
        value = self.stage(*look(args, f"stage {self.number}, input"))
        if isinstance(value, penstock.Routed):
            return penstock.Routed(*look((value.output, value.to), f"stage {self.number}, output", alone=True))
        return look(value, f"stage {self.number}, output", alone=True)


def looking(case: Case) -> Example:
    made = example(case.model, case.stages, case.rows, case.dtype)
    loss_fn = made.loss_fn
    made.stages = [Looking(stage, number) for number, stage in enumerate(made.stages)]

    def looked_at(output: Any, target: Any) -> Tensor:
        trains = torch.is_grad_enabled()  # else the pipeline asks what kind of loss this is
        return loss_fn(*(look((output, target), "loss") if trains else (output, target)))

    made.loss_fn = looked_at
    return made


def left(case: Case, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """What an optimizer finds."""
    for name, parameter in parameters:
        note(name, parameter)
        if parameter.grad is not None:
            note(f"gradient of {name}", parameter.grad, rounded=not case.in_order)


def seen_plain(case: Case) -> Counter[Seen]:
    SEEN.clear()
    made = looking(case)
    for step in range(2):
        plain_step(made, step, case.microbatches)
    left(case, nn.ModuleList(made.stages).named_parameters())
    return Counter(SEEN)


def seen_pipelined(case: Case, inputs: str = "every", **options: Any) -> Counter[Seen]:
    SEEN.clear()
    made = looking(case)
    with penstock.Pipeline(
        made.stages,
        microbatches=case.microbatches,
        schedule=case.family,
        ranks=case.ranks,
        loss_fn=made.loss_fn,
        cut_options=penstock.CutOptions(skips=made.skips),
        recompute=case.recompute,
        seed=SEED,
        batch_options=penstock.BatchOptions(inputs=inputs),
        **options,
    ) as pipe:
        for _ in range(2):
            if inputs == "every" or 0 in pipe.deployment.ranks.executors:
                pipe.step(*made.args, target=made.target)
            else:
                pipe.step()
        left(case, pipe.named_parameters())
    return Counter(SEEN)


def all_seen(cases: Sequence[tuple[Case, str]], transport: str) -> list[Counter[tuple[Any, ...]]]:
    """For processes: one start, many cases."""
    found = [seen_pipelined(case, inputs, transport=transport) for case, inputs in cases]
    return [Counter({tuple(seen): count for seen, count in each.items()}) for each in found]
