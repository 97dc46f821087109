"""After the first step on processes: what other ranks hold is gone here, says so, and can be brought back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from tiers import mostly_slow
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError

W, M, ROWS, STEPS = 6, 2, 8, 3


class Block(nn.Module):
    """Parameters, running statistics, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(W, W), nn.BatchNorm1d(W)
        self.register_buffer("shift", torch.full((W,), 0.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)) + self.shift) + x


class Counting(Block):
    """With a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Net(nn.Module):
    """A parameter that every stage's glue computes with, and a weight that the first and the last unit share."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, W))
        self.register_buffer("offset", torch.linspace(-1, 1, W))
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.blocks[3].linear.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale + self.offset.to(x.dtype) * self.blocks[3].shift  # a constant of the last stage
        for block in self.blocks:
            x = block(x)
        return x


def made(way: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if way == "position":
            return nn.Sequential(*(Counting() for _ in range(4))).double()
        return Net(Counting if way == "replay" else Block).double()  # a graph has no states of that kind


def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, W, generator=source, dtype=torch.float64)
    return x, y


def piped(model: nn.Module, way: str, **options: Any) -> penstock.Pipeline:
    x, _ = batch()
    given = {} if way == "position" else {"example": (x[: ROWS // M],), "cut_options": penstock.CutOptions(method=way)}
    return penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=F.mse_loss, **given, **options)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(way: str, steps: int) -> nn.Module:
    """The plain loop."""
    model, (x, y) = made(way), batch()
    optimizer = optimizer_of(model.parameters())
    for _ in range(steps):
        for rows, target in zip(x.chunk(M), y.chunk(M), strict=True):
            (F.mse_loss(model(rows), target) / M).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    x, y = batch()
    for _ in range(steps):
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()


def is_the_state(state: dict[str, Any], model: nn.Module) -> None:
    wanted = model.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
        else:
            assert state[name] == value


def is_the_model(found: nn.Module, wanted: nn.Module) -> None:
    """The same function, with the same buffers of all kinds."""
    is_the_state(found.state_dict(), wanted)
    shifts = [dict(each.named_buffers()) for each in (found, wanted)]
    assert all(torch.equal(shifts[0][name], value) for name, value in shifts[1].items() if "shift" in name)
    x, _ = batch()
    modes = [each.training for each in (found, wanted)]
    torch.testing.assert_close(found.eval()(x), wanted.eval()(x), rtol=1e-12, atol=1e-12)
    found.train(modes[0])
    wanted.train(modes[1])


def memory_of(model: nn.Module) -> int:
    """Bytes of all storages of a model's tensors, each once."""
    with torch._C.DisableTorchFunctionSubclass():  # what is away says nothing of its memory
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


USES: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model.eval()(batch()[0]),
    "state_dict": lambda model: model.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "value norm": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "buffers": lambda model: [buffer.numpy() for buffer in model.buffers()],
}
CHANGES: dict[str, Callable[[nn.Module], Any]] = {  # which they do to this rank's part before they come to the other
    "load_state_dict": lambda model: model.load_state_dict(
        made("graph" if isinstance(model, Net) else "position").state_dict()
    ),
    "to": lambda model: model.float(),
}


def refusals(model: nn.Module, uses: dict[str, Callable[[nn.Module], Any]]) -> dict[str, str]:
    found = {}
    for name, use in uses.items():
        try:
            use(model)
        except (PenstockError, RuntimeError) as error:
            found[name] = str(error)
    model.train()
    return found


def one_way(way: str) -> dict[str, Any]:
    """All that the tests want to know of one way to cut, on one rank."""
    model, (x, y) = made(way), batch()
    found: dict[str, Any] = {}
    with piped(model, way) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        is_the_model(model, made(way))  # until the first step
        pipe.evaluate(x, target=y)
        with pytest.raises(PenstockError):
            pipe.step(x, target=y[:3])  # which is refused
        is_the_model(model, made(way))
        whole = memory_of(model)
        train(pipe, optimizer)
        found["memory"] = memory_of(model) / whole
        found["refused"] = refusals(model, USES)
        found["asked"] = sum(parameter.numel() for parameter in model.parameters()), repr(list(model.parameters()))
        is_the_state(pipe.full_state_dict(), trained(way, 1))
        only = pipe.full_state_dict(rank=1)
        if dist.get_rank() == 1:
            is_the_state(only, trained(way, 1))
        else:
            assert only == {}
        pipe.fill_model()
        is_the_model(model, trained(way, 1))
        train(pipe, optimizer)
        found["refused again"] = refusals(model, USES)
        pipe.evaluate(x[:6], target=y[:6])  # in other sizes: shapes are known without values
        pipe.fill_model(rank=0)
        if dist.get_rank() == 0:
            is_the_model(model, trained(way, 2))
        else:
            found["refused elsewhere"] = refusals(model, USES)
        train(pipe, optimizer)
        pipe.fill_model()
        is_the_model(model, trained(way, STEPS))
        train(pipe, optimizer)
        found["changes"] = refusals(model, CHANGES)
    return found


@pytest.mark.parametrize("way", mostly_slow(["position", "replay", "graph"], "position"))
def test_a_use_of_another_ranks_part_says_where_it_is_and_what_to_call(way: str) -> None:
    for rank, found in enumerate(on_processes(2, one_way, way)):
        for moment in ("refused", "refused again", "refused elsewhere")[: 3 if rank else 2]:
            assert found[moment].keys() == USES.keys(), moment
        assert found["changes"].keys() == CHANGES.keys()
        for moment in found:
            for use, text in found[moment].items() if "refused" in moment or moment == "changes" else ():
                assert f"its values are on rank {1 - rank} (stage {1 - rank})" in text, use
                assert "pipe.full_state_dict()" in text
                assert "pipe.fill_model()" in text
        assert found["asked"][0] == sum(parameter.numel() for parameter in made(way).parameters())
        assert f"whose values are on rank {1 - rank}" in found["asked"][1]
        assert found["memory"] < 0.75  # of a model whose halves share one weight


def layers(count: int = 4, width: int = W) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).double()


def attempt(function: Callable[[], Any]) -> str:
    try:
        function()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def several(keep: bool) -> dict[str, str]:
    """Pipelines of one model: with the same placement they train it together, with another one of them is refused."""
    x, y = batch()
    model, given = layers(), {"microbatches": M, "loss_fn": F.mse_loss, "keep_model": keep, "timeout": 20}
    same = [penstock.Pipeline(model, stages=2, **given) for _ in range(2)]
    other = penstock.Pipeline(model, balance=[1, 3], **given)
    found = {}
    optimizer = torch.optim.SGD(same[0].parameters(), lr=0.1)
    for step in range(4):
        same[step % 2].step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    plain = layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    is_the_state(same[0].full_state_dict(), plain)
    found["other"] = attempt(lambda: other.step(x, target=y))
    found["late"] = attempt(lambda: penstock.Pipeline(model, stages=2, **given))
    for pipe in same:
        pipe.fill_model()
    is_the_state(model.state_dict(), plain)
    other.step(x, target=y)
    other.zero_grad()
    found["first"] = attempt(lambda: same[0].step(x, target=y))
    for pipe in (*same, other):
        pipe.close()
    return found


def as_alone() -> None:
    """The loop of one device: the optimizer and `zero_grad()` are of the whole model."""
    x, y = batch()
    for way in ("position", "replay", "graph"):
        model = made(way)
        optimizer = optimizer_of(model.parameters())
        with piped(model, way) as pipe:
            for _ in range(2):
                pipe.step(x, target=y)
                assert any(parameter.grad is not None for parameter in model.parameters())
                optimizer.step()
                model.zero_grad()
                assert all(parameter.grad is None for parameter in model.parameters())
            refused = 0
            for parameter in model.parameters():
                parameter.grad = None
                ones = torch.ones(parameter.shape, dtype=parameter.dtype)
                refused += "not in this process" in attempt(partial(setattr, parameter, "grad", ones))
            assert 0 < refused < len(list(model.parameters()))
            is_the_state(pipe.full_state_dict(), trained(way, 2))


def kept() -> tuple[bool, int]:
    """keep_model=True: the values from before the first step."""
    model = layers()
    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=F.mse_loss, keep_model=True) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        train(pipe, optimizer)
        mine = {name for name, _ in pipe.named_parameters()}
        return all(
            torch.equal(value, model.state_dict()[name]) != (name in mine)
            for name, value in layers().state_dict().items()
        ), memory_of(model)


def loaded() -> list[str]:
    """A state that is loaded before the first step makes the rest of the model old, too."""
    model, (x, _) = layers(), batch()
    said = []
    with penstock.Pipeline(model, stages=2, microbatches=M, loss_fn=F.mse_loss, timeout=20) as pipe:
        state = {name: value + 1 for name, value in layers().state_dict().items()}
        pipe.load_state_dict(state)
        said.append(attempt(lambda: model(x)))
        pipe.fill_model()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        pipe.step(x, target=x)
        said.append(attempt(pipe.fill_model))  # with gradients
        pipe.zero_grad()
        said.append(attempt(lambda: pipe.fill_model(rank=2)))
        said.append(attempt(lambda: pipe.full_state_dict(rank=dist.get_rank())))
    said.append(attempt(pipe.full_state_dict))
    return said


def built_lazily() -> None:
    with penstock.lazy():
        model = Net(Block).double()
    x, _ = batch()
    with piped(model, "replay") as pipe:
        assert "its values are on rank" in attempt(lambda: model(x))
        pipe.load_state_dict(made("graph").state_dict())
        train(pipe, optimizer_of(pipe.parameters()), STEPS)
        is_the_state(pipe.full_state_dict(), trained("graph", STEPS))
        pipe.fill_model()
        is_the_model(model, trained("graph", STEPS))


def scenarios() -> dict[str, Any]:
    built_lazily()
    return {"kept": kept(), "loaded": loaded(), "let go": several(keep=False), "marked": several(keep=True)}


@pytest.mark.slow
def test_two_pipelines_of_one_model_never_train_apart() -> None:
    for rank, told in enumerate(on_processes(2, scenarios)):
        assert told["kept"] == (True, memory_of(layers()))
        for keep in ("let go", "marked"):
            found = told[keep]
            moved = "another Pipeline of the same model trains 1.weight on rank 0 (stage 0)"
            assert moved in found["other"] if rank == 1 else found["other"].startswith("PeerFailure")
            assert found["late"].startswith("ModelError: another Pipeline trains Sequential")
            assert found["first"]
        mixed, gradients, out, apart, closed = told["loaded"]
        assert "its values are on rank" in mixed
        assert gradients.startswith("UsageError: there are gradients")
        assert out.startswith("UsageError: rank=2: pass one of the ranks 0 to 1")
        assert "call it alike on every" in apart
        assert closed.startswith("UsageError: this pipeline is closed")


def of_a_large_model() -> tuple[float, float]:
    """A model of 200 MB: what its tensors take before the first step and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(50)))
    with penstock.Pipeline(model, stages=2, microbatches=1, loss_fn=F.mse_loss) as pipe:
        before = memory_of(model)
        x = torch.randn(1, 1024)
        pipe.step(x, target=x)
        pipe.zero_grad()
        return before / 2**20, memory_of(model) / 2**20


@pytest.mark.slow
def test_after_the_first_step_a_rank_has_memory_for_its_share_only() -> None:
    for before, after in on_processes(2, of_a_large_model):
        assert before > 200
        assert after == pytest.approx(before / 2, rel=0.001)


class Late(nn.Module):
    """A buffer that the first forward makes, so that it is there only on the rank that runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(W)), nn.Parameter(torch.randn(W))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return (x - self.mean) * self.one + self.other


def filled_with_late_buffers() -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(*(Late() for _ in range(4)))
    with penstock.Pipeline(
        model, stages=4, ranks=2, schedule="interleaved-1f1b", microbatches=2, loss_fn=F.mse_loss
    ) as pipe:
        pipe.step(torch.randn(ROWS, W), target=torch.randn(ROWS, W))
        pipe.zero_grad()
        expected = pipe.full_state_dict()
        pipe.fill_model()
        found = model.state_dict()
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_buffer_that_a_forward_made_is_filled_too() -> None:
    # ranks went by the names that each had for itself: every value behind the buffer came into another's place
    assert on_processes(2, filled_with_late_buffers) == [True, True]


def test_a_parameter_of_another_rank_has_no_gradient_so_that_the_loop_of_one_device_trains_exactly() -> None:
    on_processes(2, as_alone)
