"""Plain data parallelism: the gradients of all replicas, added once per step.

A stage's gradients are complete after its last backward, which the program knows (`REDUCE_GRAD`). There they are copied
into flat buckets, and a bucket's all-reduce is started and left to run while the rest of the program goes on; the end
of the step waits for all of them. The seeds of the backward have already weighed each replica's batch against all, so
gradients are added and never scaled.

Replicas may differ in which parameters got a gradient: a bucket has all that are trained, and at the end of the step it
is told which had one anywhere; the others keep none. A parameter of two stages goes with the one whose turn comes last.
One that was put into a stage later has values of its own on each replica, and is refused. Gradients of an earlier step,
reduced already, would be added once more by each replica, and are set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from penstock.errors import ModelError
from penstock.parallel.axis_link import AxisLink
from penstock.runtime.optim.norms import like, local_of
from penstock.schedule import Op, Schedule

BUCKET_BYTES = 25 * 2**20


class Bucket:
    """Parameters of one dtype and device whose gradients travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sizes = [local_of(parameter).numel() for parameter in parameters]
        self.flat: Tensor | None = None
        self.work: Any = None

    def fill(self) -> Tensor:
        """Take the gradients over, into one new tensor; zeros in the place of those that are missing."""
        first = local_of(self.parameters[0])
        self.flat = flat = torch.empty(sum(self.sizes), dtype=first.dtype, device=first.device)
        for parameter, place in zip(self.parameters, torch.split(flat, self.sizes), strict=True):
            gradient = parameter.grad
            if gradient is None:
                place.zero_()
            else:
                place.view(local_of(parameter).shape).copy_(local_of(gradient))
                parameter.grad = None
        return flat

    def spread(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with the sum of its gradients, as views of the bucket."""
        assert self.flat is not None
        for parameter, part in zip(self.parameters, torch.split(self.flat, self.sizes), strict=True):
            yield parameter, like(parameter, part.view(local_of(parameter).shape))


def part_of(value: Any, current: Any) -> Any:
    """Cut a whole value, which every rank has, into a part like `current`."""
    if not isinstance(current, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != current.shape:
        return value  # Torch refuses it in its own words.
    shape, offset = compute_local_shape_and_global_offset(value.shape, current.device_mesh, current.placements)
    local = value[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
    return like(current, local.to(local_of(current)).contiguous())


class Reducer:
    """The parameters of this rank's stages that are whole on every replica."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        names: Mapping[int, str],
        link: AxisLink | None,
        managed: Iterable[nn.Parameter] = (),
    ) -> None:
        self._modules, self._names, self._link = modules, names, link
        self._managed = {id(parameter) for parameter in managed}  # Something else reduces these.
        self._known = {id(each): each for module in modules.values() for each in module.parameters()}
        self._order: tuple[int, ...] = ()
        self._trained: list[bool] = []
        self._buckets: dict[int, list[Bucket]] = {}
        self._started: list[Bucket] = []
        self._done: set[int] = set()
        self.present = 0  # a bit for each parameter, in the order of `parameters`, that had a gradient here
        self.parameters: list[nn.Parameter] = []

    def begin(self, program: Schedule, rank: int) -> None:
        """Begin a step; the buckets are laid out anew only if what is trained has changed."""
        self._started, self._done, self.present = [], set(), 0
        order = tuple(each.stage for each in program.rows[rank] if each is not None and each.op is Op.REDUCE_GRAD)
        trained = [parameter.requires_grad for parameter in self.held()]
        if order == self._order and trained == self._trained:
            return
        self._order, self._trained = order, trained
        last: dict[int, tuple[nn.Parameter, int]] = {}
        for stage in order:
            for parameter in self._modules[stage].parameters():
                if parameter.requires_grad and id(parameter) not in self._managed:
                    last[id(parameter)] = (parameter, stage)
        self.parameters = [parameter for parameter, _ in last.values()]
        self._bit = {key: 1 << place for place, key in enumerate(last)}
        self._buckets = {
            stage: list(self._cut([parameter for parameter, where in last.values() if where == stage]))
            for stage in order
        }

    def held(self) -> list[nn.Parameter]:
        return [parameter for module in self._modules.values() for parameter in module.parameters()]

    def copied(self) -> list[tuple[str, nn.Parameter]]:
        """Return what every replica holds whole, by name."""
        return [
            (self._names.get(key, "a parameter"), each) for key, each in self._known.items() if key not in self._managed
        ]

    def strangers(self, held: Iterable[nn.Parameter]) -> list[str]:
        """Return the names of parameters that were not there when the copies of these stages were made equal."""
        if all(id(parameter) in self._known for parameter in held):
            return []
        return [
            f"{name} of stage {stage}"
            for stage, module in self._modules.items()
            for name, parameter in module.named_parameters()
            if id(parameter) not in self._known
        ]

    def _cut(self, parameters: Sequence[nn.Parameter]) -> Iterator[Bucket]:
        kinds: dict[Any, list[nn.Parameter]] = {}
        for parameter in parameters:
            local = local_of(parameter)
            kinds.setdefault((local.dtype, local.device), []).append(parameter)
        for group in kinds.values():
            begin, size = 0, 0
            for place, parameter in enumerate(group):
                size += local_of(parameter).nbytes
                if size >= BUCKET_BYTES or place == len(group) - 1:
                    yield Bucket(group[begin : place + 1])
                    begin, size = place + 1, 0

    def start(self, stage: int) -> None:
        """Start REDUCE_GRAD: the stage's gradients leave, and the sums come while other things run."""
        for parameter in self._reduced_with(stage):
            if parameter.grad is not None:
                self._check(parameter, parameter.grad)
                self.present |= self._bit[id(parameter)]
        self._issue(stage)

    def _reduced_with(self, stage: int) -> Iterator[nn.Parameter]:
        return (parameter for bucket in self._buckets[stage] for parameter in bucket.parameters)

    def _issue(self, stage: int) -> None:
        self._done.add(stage)
        if self._link is None:
            return
        for bucket in self._buckets[stage]:
            bucket.work = dist.all_reduce(bucket.fill(), group=self._link.group, async_op=True)
            self._started.append(bucket)

    def _check(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            name = self._names.get(id(parameter), "a parameter")
            raise ModelError(
                f"the gradient of {name} is sparse, and replicas add dense ones; use sparse=False in its layer"
            )
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            # each rank may have only its summand of the gradient of a parameter that all ranks of an axis hold
            parameter.grad = gradient.redistribute(placements=parameter.placements)

    def drain(self, stage: int) -> None:
        """Give the other replicas their all-reduce although the step has failed."""
        if stage not in self._done:
            for parameter in self._reduced_with(stage):
                parameter.grad = None
            self._issue(stage)

    def finish(self, discard: bool = False) -> None:
        """Wait for the sums and put them in place, or drop them; whoever had no gradient gets zeros here."""
        started, self._started = self._started, []
        for bucket in started:
            assert self._link is not None
            self._link.wait(bucket.work, "the reduction of gradients")
            if not discard:
                for parameter, gradient in bucket.spread():
                    parameter.grad = gradient
            bucket.flat = bucket.work = None


def make_equal(tensors: Iterable[Tensor], link: AxisLink) -> None:
    """Give all members the values of the first, as they must have to begin with."""
    devices: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            devices.setdefault(tensor.device, []).append(tensor.detach())
    for waiting in devices.values():
        while waiting:
            part: list[Tensor] = []
            size = 0
            while waiting and (not part or size + waiting[0].nbytes <= BUCKET_BYTES):
                part.append(waiting.pop(0))
                size += part[-1].nbytes
            # Tensors travel as bytes, because backends do not know every dtype.
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in part])
            with link.waiting("the hand-out of parameters"):
                dist.broadcast(flat, group=link.group, group_src=0)
            for tensor, values in zip(part, torch.split(flat, [tensor.nbytes for tensor in part]), strict=True):
                tensor.copy_(values.clone().view(tensor.dtype).view(tensor.shape))
