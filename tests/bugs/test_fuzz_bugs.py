"""What the differential fuzz (`python -m tests.fuzz`) has found in this pipeline."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bugs.small import WIDTH, batch, check, linears, pipeline
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import CutOptions
from penstock.errors import ModelError, PeerFailure, UsageError
from penstock.model.cut import cut_model
from penstock.parallel.data_parallel.sharded import check_shardable


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def openmp_threads() -> int:
    """How many threads OpenMP would use here. torch's own number would be set by asking for it."""
    (path,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    found: int = ctypes.CDLL(path).omp_get_max_threads()
    return found


class Told(nn.Linear):
    """Keeps how many threads its kernels may use."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.double()
        self.seen: set[int] = set()

    def forward(self, input: Tensor) -> Tensor:
        self.seen.add(openmp_threads())
        return super().forward(input)


@pytest.mark.usefixtures("_threads_as_before")
def test_ranks_on_threads_use_as_many_cores_as_the_user_said() -> None:
    """torch.set_num_threads(1) held for the thread that called it; ranks used all cores, and summed in another order.

    A convolution's weight gradient then differed from the plain loop's in its last bit.
    """
    stages, (x, y) = [Told(), Told()], batch()
    with pipeline(stages) as pipe:
        for wanted in (3, 2):
            torch.set_num_threads(wanted)
            for stage in stages:
                stage.seen.clear()
            pipe.step(x, target=y)
            assert [stage.seen for stage in stages] == [{wanted}, {wanted}]


class Fades(nn.Module):
    """Counts its calls where only Python looks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.log, self.seen = kind, 0, [0], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.kind == "number":
            self.calls += 1
        if self.training and self.kind == "list":
            self.log.append(len(self.log))
        if self.training and self.kind == "tensor":
            self.seen += 1
        return x / (1 + self.calls + len(self.log) + self.seen)


@pytest.mark.parametrize("kind", ["number", "list", "tensor", "nothing"])
def test_a_layer_on_two_stages_that_counts_in_an_attribute_is_refused(kind: str) -> None:
    """Only buffers were looked at: outputs were up to 11 % off the plain loop's, in which all counts come in turn."""
    fades, (x, y) = Fades(kind), batch()
    first, last = linears(2)
    stages = [nn.Sequential(first, fades), nn.Sequential(fades, last)]
    with pipeline(stages, microbatches=4) as pipe:
        if kind == "nothing":
            check(pipe)
            return
        named = {"number": "calls", "list": "log", "tensor": "seen"}[kind]
        with pytest.raises(PeerFailure, match=f"stages . and . have one Fades, which changes its attribute {named}"):
            pipe.step(x, target=y)
    with pipeline([nn.Sequential(first, fades, fades), last]) as pipe:  # on one stage all is in turn
        pipe.step(x, target=y)


class Twice(nn.Module):
    """One layer at two places, with or without parameters."""

    def __init__(self, kind: str, weighted: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = linears(3)
        self.again = nn.Sequential(Fades(kind), nn.Linear(WIDTH, WIDTH)) if weighted else Fades(kind)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.again(self.second(self.again(self.first(x)))))
        return out


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["number", "list", "tensor", "nothing"])
def test_a_layer_called_on_two_stages_that_counts_in_an_attribute_is_refused(kind: str, weighted: bool) -> None:
    """Of a model that is replayed, buffers and numbers were looked at, and layers without parameters not at all.

    Losses were up to 17 % off the plain loop's: each stage counted its own calls, or both counted in their own order.
    """
    net, (x, _) = Twice(kind, weighted).double(), batch()
    if kind == "nothing":
        assert cut_model(net, 3, example=(x,), options=CutOptions(method="replay")).stages == 3
        return
    named = {"number": "calls", "list": "log", "tensor": "seen"}[kind]
    with pytest.raises(ModelError, match=rf"no cut would part again\.(0\.)?{named} from code"):
        cut_model(net, 4, example=(x,), options=CutOptions(method="replay"))


class Seen(nn.Module):
    """Counts rows in a tensor, and calls in a list, that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows, self.log = nn.Linear(WIDTH, WIDTH), torch.zeros(()), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        self.log[0] += 1
        return self.linear(x) + 0.01 * self.rows.to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Seen(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


def test_a_unit_that_is_run_for_its_shapes_keeps_its_tensors() -> None:
    """Where a microbatch had another size than the example, the unit was run once more to learn what it returns.

    That was on a copy, but tensors that are plain attributes were not copied: one call too many was counted.
    """
    net, (x, y) = Net().double(), batch(8)
    with penstock.Pipeline(
        net,
        stages=2,
        microbatches=4,
        loss_fn=F.mse_loss,
        example=(x[:3],),
        cut_options=penstock.CutOptions(method="replay"),
        ranks=2,
    ) as pipe:
        for step in (1, 2):
            pipe.step(x, target=y)
            assert (net.first.rows.item(), net.first.log[0].item()) == (8 * step, 4 * step)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_that_fsdp_would_lose_is_refused(kind: str) -> None:
    """Hooks were looked for on the shards, which take the parameters' place: one registered before was lost.

    The gradient of a weight whose hook doubles it was half of the plain loop's.
    """
    stages = linears(2)
    getattr(stages[1].bias, kind)(lambda gradient: None)
    parts = dict(enumerate(cut_model(stages, None).parts))
    check_shardable({0: parts[0]}, False, set())
    with pytest.raises(
        ModelError, match=r"1\.bias of stage 1 has a hook, which ParallelOptions\(replicate='fsdp'\) cannot call"
    ):
        check_shardable(parts, False, set())
    check_shardable(parts, False, {stages[1].bias})  # what stays whole keeps its hooks


def test_predict_needs_no_arguments_of_the_loss() -> None:
    """It has no loss to compute, but was refused since loss_fn would lack what only step() can give."""

    def loss_fn(output: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        return (scale * (output - target)).square().mean()

    x, y = batch()
    with pipeline(loss_fn=loss_fn) as pipe:
        pipe.step(x, target=y, loss_kwargs={"scale": y})
        assert pipe.predict(x).shape == x.shape
        with pytest.raises(UsageError, match="missing a required argument: 'scale'"):
            pipe.evaluate(x, target=y)


def names_on_this_rank() -> list[str]:
    stages = linears(4)
    stages[3] = stages[1]
    with pipeline(stages) as pipe:
        return [name for name, _ in pipe.named_parameters()]


def test_a_layer_on_two_ranks_goes_by_its_first_name_on_both() -> None:
    """A list of stages, or an nn.Sequential, had the name of the later place on the rank that has only that.

    So a parameter had another name there than in the model, on threads, and where a model is cut by its forward.
    """
    stages = linears(4)
    stages[3] = stages[1]
    want = [name for name, _ in nn.ModuleList(stages).named_parameters()]
    first, second = on_processes(2, names_on_this_rank)
    assert first == want[:4]
    assert second == [*want[4:], *want[2:4]]
