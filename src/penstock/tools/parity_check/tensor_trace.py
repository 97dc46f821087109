"""What one side of the comparison computes, tensor by tensor, each under the place where it came up.

A model that is replayed is also compared with itself uncut. Each stage of it runs the whole forward, with stand-ins for
what it does not need. That it needs no more was found by following one example, so here it is put to the proof:
stand-ins are filled with NaN, which spreads to whatever depends on them, and the stages together must still give what
one stage, with no stand-in at all, gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ParityError
from penstock.model.cut import cut_model
from penstock.model.cut_options import CutOptions
from penstock.model.part import OUTPUT
from penstock.model.staged_model import StagedModel
from penstock.pipeline import Pipeline
from penstock.runtime.engine.stage import Stage, StageInput

AFTER = 2**31  # Stands for the number of a microbatch when all are done.


class TensorPlace(NamedTuple):
    """What a tensor is. Their order is such that causes come before what they cause."""

    step: int
    phase: int  # 0: forwards; 1: backwards, from the last stage; 2: when the step is done
    order: int
    number: int
    kind: str
    name: str

    @property
    def stage(self) -> int:
        return abs(self.order)

    def __str__(self) -> str:
        number = "" if self.number == AFTER else f", microbatch {self.number}"
        return f"step {self.step}, stage {self.stage}{number}, {self.name}"


class TensorTrace:
    """The tensors that one side computes, by place."""

    def __init__(self, split: StagedModel) -> None:
        self.tensors: dict[TensorPlace, Tensor] = {}
        self.numbers = [-1] * split.stages  # the microbatch that each stage goes back through now
        self.forks = -1  # the last stage that emits several tensors: from there back, gradients meet in another order
        self._split = split
        self._step = 0
        owners = [id(parameter) for part in split.parts for parameter in part.module.parameters()]
        self._tied = {owner for owner in owners if owners.count(owner) > 1}

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Surround a step, and keep what each backward gives to each parameter."""
        self._step = step
        with ExitStack() as hooks:
            for part in self._split.parts:
                for name, parameter in part.module.named_parameters():
                    if parameter.requires_grad and id(parameter) not in self._tied:
                        keeper = self._keeper(part.index, part.names.get(name, name))
                        hooks.callback(parameter.register_hook(keeper).remove)  # type: ignore[no-untyped-call]
            yield

    def _keeper(self, stage: int, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            place = TensorPlace(self._step, 1, -stage, self.numbers[stage], "gradient", f"gradient of {name}")
            if place in self.tensors:
                place = place._replace(name=f"{place.name}, once more")
            self.tensors[place] = gradient.detach().clone()

        return keep

    def keep_forward(
        self, stage: int, number: int, emitted: Mapping[int, Any], loss: Any, extra: Iterable[Any]
    ) -> None:
        """Keep what a stage made of a microbatch, and what that did to its buffers."""
        place = TensorPlace(self._step, 0, stage, number, "output", "")
        leaves = [
            leaf for key in sorted(emitted) for leaf in pytree.tree_leaves(emitted[key]) if isinstance(leaf, Tensor)
        ]
        if sum(leaf.requires_grad for leaf in leaves) > 1 and OUTPUT not in emitted:
            self.forks = max(self.forks, stage)
        named = [("output", f"output tensor {index}", leaf) for index, leaf in enumerate(leaves)]
        named += [("loss", f"extra loss {name} ({index})", value) for index, (name, value) in enumerate(extra)]
        named += [("loss", "the loss", loss)] if loss is not None else []
        for kind, name, tensor in named + self._buffers(stage):
            self.tensors[place._replace(kind=kind, name=name)] = tensor.detach().clone()

    def keep_step(self, loss: Tensor | None) -> None:
        """Keep what a step leaves behind."""
        for part in self._split.parts:
            place = TensorPlace(self._step, 2, part.index, AFTER, "gradient", "")
            named = self._buffers(part.index)
            for name, parameter in part.module.named_parameters():
                if parameter.grad is not None:
                    kind = "tied" if id(parameter) in self._tied else "gradient"
                    named.append((kind, f"summed gradient of {part.names.get(name, name)}", parameter.grad))
            for kind, name, tensor in named:
                self.tensors[place._replace(kind=kind, name=name)] = tensor.detach().clone()
        if loss is not None:
            place = TensorPlace(self._step, 2, self._split.stages - 1, AFTER, "loss", "the batch's loss")
            self.tensors[place] = loss.detach().clone()

    def summed(self) -> dict[tuple[int, str], Tensor]:
        """Return what steps leave behind, by (step, name), whichever stage has it."""
        return {(place.step, place.name): tensor for place, tensor in self.tensors.items() if place.phase == 2}

    def _buffers(self, stage: int) -> list[tuple[str, str, Tensor]]:
        part = self._split.parts[stage]
        named = part.module.named_buffers()
        return [("buffer", f"buffer {part.names.get(name, name)}", buffer) for name, buffer in named]


@contextmanager
def watching_stages(pipe: Pipeline, trace: TensorTrace) -> Iterator[None]:
    """Let the trace see what stages emit, and which microbatch they go back through."""
    stages = {
        index: stage
        for executor in pipe.deployment.ranks.executors.values()
        for index, stage in executor.stages.items()
    }

    def watch(index: int, stage: Stage) -> None:
        forward, backward, weights = stage.forward, stage.backward, stage.weight_gradients

        def watched_forward(given: StageInput) -> Any:
            made = forward(given)
            trace.keep_forward(index, given.microbatch, *made)
            return made

        def watched_backward(number: int, *inputs: Any, **options: Any) -> Any:
            trace.numbers[index] = number
            return backward(number, *inputs, **options)

        def watched_weights(number: int) -> None:
            trace.numbers[index] = number
            weights(number)

        stage.__dict__.update(forward=watched_forward, backward=watched_backward, weight_gradients=watched_weights)

    for index, stage in stages.items():
        watch(index, stage)
    try:
        yield
    finally:
        for stage in stages.values():
            for name in ("forward", "backward", "weight_gradients"):
                del stage.__dict__[name]


ROUNDINGS = 4  # Times the rounding of the largest gradient.


def uncut(split: StagedModel, model: Any, cut: Mapping[str, Any]) -> StagedModel | None:
    """Return the model in one stage, where its cut could hide a mistake: where stages compute with values of no use.

    Of the cut one, these values become NaN.
    """
    poisoned = [part.poison() for part in split.parts]
    if split.stages == 1 or not poisoned[0]:
        return None
    return cut_model(model, 1, example=cut["example"], options=CutOptions(method="replay"))


def compare_uncut(
    split: StagedModel,
    cut: Mapping[tuple[int, str], Tensor],
    whole: Mapping[tuple[int, str], Tensor],
    tolerance: float | None,
) -> None:
    """Compare gradients, buffers and losses, by name; of a tied parameter's names the model uses the first."""
    prefix = "summed gradient of "
    scale = largest(tensor for (_, name), tensor in whole.items() if name.startswith(prefix))
    for (step, name), have in cut.items():
        own = name.removeprefix(prefix)
        known = f"{prefix}{split.aliases.get(own, own)}" if name.startswith(prefix) else name
        want = whole.get((step, known))
        if want is None:
            raise ParityError(f"step {step}, {known}: the model cut into stages has one, the uncut model has none")
        roundings = 64 * torch.finfo(want.dtype).eps if want.is_floating_point() else 0.0
        allowed = roundings if tolerance is None else tolerance
        check_close(f"step {step}, {known}, cut against uncut", want, have, allowed, scale * name.startswith(prefix))


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest number in them all, of those that are numbers."""
    return max((each.abs().nan_to_num(0.0, 0.0, 0.0).max().item() for each in tensors if each.numel()), default=0.0)


def check_close(place: object, want: Tensor, have: Tensor, tolerance: float, scale: float = 0.0) -> float:
    """Return how far apart they are, relative to the largest entry; raise where that is too far.

    `scale` is the largest gradient of the model: where a gradient is 0 by mathematics (of an attention's key bias),
    what it consists of is the rounding of others, and where that is allowed at all, a few of it are.
    """
    if want.shape != have.shape or want.dtype != have.dtype:
        raise ParityError(
            f"{place}: the pipeline has {have.dtype} of shape {tuple(have.shape)}, the plain model "
            f"{want.dtype} of shape {tuple(want.shape)}"
        )
    if torch.equal(want, have):
        return 0.0
    wide, other = want.to(torch.float64), have.to(torch.float64)
    if torch.allclose(wide, other, 0.0, 0.0, equal_nan=True):  # not a number on both sides
        return 0.0
    floor = ROUNDINGS * torch.finfo(want.dtype).eps * scale if want.is_floating_point() and tolerance else 0.0
    size = max(wide.abs().max().item(), 1e-30) + (floor / tolerance if tolerance else 0.0)
    distance = (other - wide).abs().max().item() / size
    if not distance <= tolerance:
        raise ParityError(
            f"{place}: the pipeline and the plain model differ by {distance:.3g} of its largest entry "
            f"(allowed: {tolerance:.3g})"
        )
    return float(distance)
