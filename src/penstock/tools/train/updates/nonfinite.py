"""Which module made the first number that is none.

When a loss comes out inf or NaN, the step is run once more with the same batch and the same random numbers, and
every module's output is looked at on the way. The lowest stage with a bad output has the culprit: what is behind it
only passed it on. Where all outputs are good, the bad number came up in the loss or in the backward, and the
parameters' gradients show it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.checkpoint.processes import Processes
from penstock.errors import RunError
from penstock.pipeline import Pipeline


class NonFinite(RunError):
    """A loss or gradient was inf or NaN. Started again, the run would meet it again."""


class _Found(NamedTuple):
    """The first bad thing of one stage; `order` is by the time it was met, weights before outputs."""

    stage: int
    order: int
    words: str
    parameter: str = ""


class Culprit(NamedTuple):
    """Where the first bad number is, in words; `parameter` names the one that had it before the step, if one had."""

    words: str
    parameter: str = ""


def find_culprit(pipe: Pipeline, again: Callable[[], Any]) -> Culprit:
    """Run the step again, on every rank, and find where the first bad number is: the same on all of them.

    Gradients are left dropped. What the step did to buffers (running statistics) it does twice.
    """
    found = _bad_parameters(pipe)
    pipe.zero_grad()
    with ExitStack() as hooks:
        for stage, part in pipe.deployment.ranks.modules().items():
            for name, module in filter(itemgetter(0), part.named_modules()):
                hooks.callback(module.register_forward_hook(_look(pipe, stage, name, found)).remove)
        pipe.deployment.counter.step -= 1
        result = again()
    bad_loss = result.loss is not None and not bool(torch.isfinite(result.loss))
    gradients = [] if found else _bad_gradients(pipe)
    pipe.zero_grad()
    answers = Processes(pipe, "the search for a bad number").exchange((found, gradients))
    outputs = sorted(entry for entries, _ in answers for entry in entries)
    if outputs:
        stage, _, words, parameter = outputs[0]
        return Culprit(f"stage {stage}: {words}", parameter)
    last = pipe.deployment.staged.stages - 1
    if bad_loss:
        return Culprit(f"stage {last}: the loss function; every module's output was finite")
    # the backward goes from the end
    later = sorted((entry for _, entries in answers for entry in entries), reverse=True)
    if later:
        return Culprit(f"stage {later[0][0]}: {later[0][1]}")
    return Culprit("no module: run once more, the same step was finite on every rank")


def _bad_parameters(pipe: Pipeline) -> list[_Found]:
    found = []
    for holding in pipe.deployment.holdings():
        for name, value in holding.module.named_parameters():
            if not bool(torch.isfinite(value).all()):
                full = holding.names.get(name, name)
                words = f"the parameter {full} was already {_kind(value)} before the step"
                found.append(_Found(holding.stage, -1, words, full))
                break
    return found


def _bad_gradients(pipe: Pipeline) -> list[tuple[int, str]]:
    found = []
    for holding in pipe.deployment.holdings():
        gradients = [(name, value.grad) for name, value in holding.module.named_parameters() if value.grad is not None]
        names = [name for name, gradient in gradients if not bool(torch.isfinite(gradient).all())]
        if names:  # The last one is nearest to the loss.
            full = holding.names.get(names[-1], names[-1])
            owner = full.rpartition(".")[0] or full
            words = f"the backward of {owner}; all outputs were finite, the gradient of {full} is not"
            found.append((holding.stage, words))
    return found


def _look(pipe: Pipeline, stage: int, name: str, found: list[_Found]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if any(one.stage == stage for one in found):
            return
        for value in pytree.tree_leaves(output):
            if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                named = f"{_full_name(pipe, stage, name, module)} ({type(module).__name__})"
                found.append(_Found(stage, len(found), f"{named}, whose output has {_kind(value)}"))
                return

    return hook


def _full_name(pipe: Pipeline, stage: int, name: str, module: nn.Module) -> str:
    """Return the module's name in the whole model, read off a parameter of it."""
    own = next((inner for inner, _ in module.named_parameters()), None)
    if own is None:
        return name
    full = pipe.deployment.staged.parts[stage].names.get(f"{name}.{own}", f"{name}.{own}")
    return full.removesuffix(f".{own}")


def _kind(value: Tensor) -> str:
    return "NaN" if bool(torch.isnan(value).any()) else "inf"
