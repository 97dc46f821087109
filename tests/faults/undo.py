"""Models that keep state in every way there is, steps of them that fail on purpose, and all that a failure could move.

`Fault` ends a step at one action of its program, before or after that action has run. What `trained` returns says all
about the model after each step, in bits: a run with failures in between must return the same as one without.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PeerFailure
from penstock.model.original.placeholders import is_away
from penstock.runtime.engine.handlers import Context
from penstock.schedule import Action, Op

WIDTH = 4
ROWS = 8
OPS = (Op.F, Op.B, Op.I, Op.W, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD)


class Boom(Exception):
    """What no library would ever raise by itself."""


class Block(nn.Module):
    """Weights, dropout, batch norm and a counter in a buffer: a graph can be captured of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        kept: Tensor = self.drop(self.norm(torch.tanh(self.linear(x)))) + 0.01 * self.count
        return kept


class Keeper(Block):
    """All that a layer can keep, and everything it keeps is in its output."""

    def __init__(self, elsewhere: bool = False, writes: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("past", torch.zeros(WIDTH))
        self.register_buffer("found", None)
        self.calls, self.log, self.table, self.window = 0, [0.0], {"last": 0.0}, deque([0.0], maxlen=2)
        self.nested = [{"tensors": (torch.zeros(WIDTH),)}]
        self.own = torch.Generator().manual_seed(3)
        self.elsewhere = elsewhere  # draw from the generators of Python and numpy too
        self.writes = writes  # to tensors in attributes, which replay refuses

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        seen = x.detach().mean(0)
        self.mean = 0.9 * self.mean + 0.1 * seen  # another tensor
        self.past.data.add_(seen)  # past its version
        self.found = seen if self.found is None else self.found + seen
        if self.writes:
            self.nested[0]["tensors"][0].mul_(0.5).add_(seen)
        else:
            self.nested[0]["tensors"] = (0.5 * self.nested[0]["tensors"][0] + seen,)
        self.calls += 1
        self.log.append(1 / self.calls)
        self.table["last"] = self.table.get("last", 0.0) + 0.5
        self.table[str(self.calls)] = 1.0
        self.window.append(self.log[-1])
        x = x + 0.1 * self.mean + 0.1 * self.past + 0.1 * self.nested[0]["tensors"][0] + 0.1 * self.found
        x = x + sum(self.window) + self.table["last"] + 0.1 * torch.rand(WIDTH, generator=self.own)
        if self.elsewhere:
            x = x * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand())
        return x


class Net(nn.Module):
    """The same layers behind a forward of its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Centred(nn.Module):
    """A loss with a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centre += 0.1 * output.detach().mean(0)
        return ((output - target - 0.01 * self.centre) ** 2).mean()


def layers_of(cut: str, count: int, elsewhere: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    if cut == "graph":
        return [Block() for _ in range(count)]
    return [Keeper(elsewhere and number == 1, cut == "position") for number in range(count)]


def pipeline(cut: str = "position", *, stages: int = 4, elsewhere: bool = True, **options: Any) -> penstock.Pipeline:
    layers = layers_of(cut, stages, elsewhere)
    model: Any = nn.Sequential(*layers)
    if cut != "position":
        model = Net(layers)
        options |= {"example": (torch.zeros(2, WIDTH),), "cut_options": penstock.CutOptions(method=cut)}
    options = {
        "microbatches": 4,
        "loss_fn": Centred(),
        "loss_options": penstock.LossOptions(per_microbatch=True),
        "seed": 5,
        "timeout": 30.0,
        **options,
    }
    pipe = penstock.Pipeline(model, stages=stages, **options)
    pipe.kept = layers  # type: ignore[attr-defined]
    return pipe


def batch(step: int) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + step)
        return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def state(pipe: penstock.Pipeline) -> dict[str, Any]:
    """All that a failed step could have changed, in bits that can be compared."""
    found: dict[str, Any] = {}
    for name, parameter in pipe.named_parameters():
        found[f"parameter {name}"] = local(parameter).clone()
        found[f"gradient {name}"] = None if parameter.grad is None else local(parameter.grad).clone()
    for number, layer in enumerate(pipe.kept):  # type: ignore[attr-defined]
        for name, buffer in (*layer._buffers.items(), *layer.norm._buffers.items()):
            elsewhere = buffer is None or is_away(buffer)
            found[f"buffer {number}.{name}"] = None if elsewhere else buffer.clone()
        found[f"modes {number}"] = [module.training for module in layer.modules()]
        if isinstance(layer, Keeper):
            found[f"attributes {number}"] = repr((layer.calls, layer.log, layer.table, layer.window, layer.nested))
            found[f"generator {number}"] = layer.own.get_state()
    if isinstance(pipe.loss_fn, Centred) and not is_away(pipe.loss_fn.centre):
        found["centre"] = pipe.loss_fn.centre.clone()
    found["torch"] = torch.get_rng_state()
    found["python"] = repr(random.getstate())
    found["numpy"] = repr(numpy.random.get_state())
    found["clock"] = (pipe.deployment.counter.step, pipe.deployment.counter.evaluations)
    return found


def local(tensor: Tensor) -> Tensor:
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same in both, bit for bit."""
    assert list(one) == list(other), [*one, *other]
    return [name for name in one if not same(one[name], other[name])]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    return bool(one == other) if type(one) is type(other) else False


class Fault:
    """Raises at one action, by chance or at `place`, once it is armed: in all replicas, or in one."""

    def __init__(self, pipe: penstock.Pipeline, seed: int, place: str = "") -> None:
        self.pipe, self.random = pipe, random.Random(seed)
        self.place, self.chosen, self.after, self.here = place, bool(place), True, True

    def arm(self) -> None:
        if self.chosen:
            return
        parts = [part for row in self.pipe.program.rows for action in row if action for part in action.parts()]
        self.place = str(self.random.choice([part for part in parts if part.op in OPS]))
        self.after = self.random.random() < 0.7
        self.here = self.random.choice([None, *range(self.pipe.deployment.replication.replicas)]) in (
            None,
            self.pipe.deployment.replication.index,
        )

    def __call__(self, action: Action, context: Context) -> None:
        hit = str(action) == self.place and self.here
        if hit and not self.after:
            raise Boom(self.place)
        context.run(action)
        if hit:
            raise Boom(self.place)

    @contextmanager
    def armed(self) -> Iterator[None]:
        self.arm()
        for op in OPS:
            self.pipe.register(op, self)
        try:
            yield
        finally:
            for op in OPS:
                self.pipe.register(op, None)


def fail(pipe: penstock.Pipeline, fault: Fault, step: int) -> PeerFailure:
    x, y = batch(step)
    with fault.armed():
        try:
            pipe.step(x, target=y)
        except PeerFailure as failure:
            return failure
    raise AssertionError(f"{fault.place} was never reached")


def trained(
    pipe: penstock.Pipeline, faults: int | None = None, *, steps: int = 4, every: int = 1
) -> tuple[list[Any], list[str]]:
    """The state and the loss after each step, and what a failure in between has changed.

    `faults` seeds the failures, two before each step; `every` is how many steps add up before the optimizer's.
    """
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    fault = None if faults is None else Fault(pipe, faults)
    told, moved = [], []
    for step in range(steps):
        for attempt in range(0 if fault is None else 2):
            assert fault is not None
            before = state(pipe)
            failure = fail(pipe, fault, step)
            moved += [f"step {step}.{attempt} at {fault.place}: {name}" for name in differences(state(pipe), before)]
            assert "this step is undone" in " ".join(failure.__notes__), failure.__notes__
        x, y = batch(step)
        loss = pipe.step(x, target=y).loss
        told.append({"loss": loss, **state(pipe)})
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return told, moved
