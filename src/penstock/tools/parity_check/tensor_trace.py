"""What one side of the comparison computes, tensor by tensor, each under the place where it came up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

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
