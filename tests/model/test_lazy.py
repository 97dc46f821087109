"""`penstock.lazy()`: built without memory, cut from shapes, filled by name, each process its own part only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model.nets import Tied, W, square
from processes import on_processes
from torch import Tensor, nn

import penstock
from penstock.errors import UsageError


class Recurrent(nn.Module):
    """LSTMs keep references to their parameters beside the tables that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(W, W, batch_first=True) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Marked(nn.Module):
    """Parameters that the model's own code reads: its own, a container's, and the weight of a layer elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(W)), nn.Parameter(torch.ones(1))
        self.layers = Recurrent().layers
        self.inner = nn.Module()
        self.inner.scale, self.inner.norms = nn.Parameter(torch.ones(W)), nn.ModuleList(nn.LayerNorm(W) for _ in (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first
        for layer in self.layers:
            x = layer(x)[0]
        for norm in self.inner.norms:
            x = norm(x) * self.inner.scale
        return x * self.last + self.layers[0].bias_hh_l0[:W]


def ids() -> Tensor:
    return torch.randint(0, 20, (4, 5), generator=torch.Generator().manual_seed(1))


def piped(model: nn.Module, x: Tensor, **options: Any) -> penstock.Pipeline:
    options = {
        "stages": 2,
        "microbatches": 2,
        "loss_fn": square,
        "cut_options": penstock.CutOptions(method="replay"),
        **options,
    }
    return penstock.Pipeline(model, example=(x[:2],), **options)


def by_name(name: str, tensor: Tensor) -> None:
    """Values that follow from the name alone, so that they are the same wherever it is filled."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)


def filled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            by_name(name, parameter)
    return model


def test_construction_takes_no_memory_for_parameters() -> None:
    with penstock.lazy():
        model = Tied(words=1000)
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters() if not parameter.is_meta) == 0
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not nn.Linear(2, 2).weight.is_meta  # outside, all is as before


@pytest.mark.parametrize("stages", [2, 4])
def test_the_cut_is_that_of_the_model_in_memory(stages: int) -> None:
    with penstock.lazy():
        model = Tied()
    with piped(Tied(), ids(), stages=stages) as eager, piped(model, ids(), stages=stages) as lazily:
        names = [[sorted(part.names.values()) for part in pipe.deployment.staged.parts] for pipe in (eager, lazily)]
        assert names[0] == names[1]
        assert eager.deployment.staged.topology == lazily.deployment.staged.topology


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Tied, ids()),
        pytest.param(Recurrent, torch.randn(4, 3, W), marks=pytest.mark.slow),
        pytest.param(Marked, torch.randn(4, 3, W), marks=pytest.mark.slow),
    ],
)
def test_values_by_name_or_from_a_state_train_as_the_plain_model(net: type[nn.Module], x: Tensor) -> None:
    plain = filled(net())
    results = []
    for way in ("init", "state", "eager"):
        with penstock.lazy():
            model = net()
        source = filled(net()) if way == "eager" else model
        with piped(source, x, init=by_name if way == "init" else None) as pipe:
            if way == "state":
                pipe.load_state_dict(plain.state_dict())
            loss = pipe.step(x).loss
            results.append([loss, *(parameter.grad for parameter in pipe.parameters())])
    for found in results[:2]:
        assert len(found) == len(results[2])
        for one, other in zip(found, results[2], strict=True):
            assert one is not None
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # threads add to a tied gradient as they come


def test_a_step_before_there_are_values_is_refused() -> None:
    with penstock.lazy():
        model = Tied()
    with (
        piped(model, ids()) as pipe,
        pytest.raises(UsageError, match=r"built lazily and have no values.*load_state_dict"),
    ):
        pipe.step(ids())


def own_part() -> tuple[float, list[str], int]:
    with penstock.lazy():
        model = Tied(words=50)
    with piped(model, ids(), stages=None, split_at=["blocks.2"], init=by_name) as pipe:
        loss = pipe.step(ids()).loss
        assert loss is not None
        with penstock.lazy():
            marked = Marked()
        x = torch.ones(4, 3, W)
        with piped(marked, x, init=by_name) as other:
            torch.testing.assert_close(other.step(x).loss, square(filled(Marked())(x)).detach())
        with torch._C.DisableTorchFunctionSubclass():  # what is away says nothing of its memory
            storages = [parameter.untyped_storage() for parameter in model.parameters()]
            held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return loss.item(), [name for name, _ in pipe.named_parameters()], sum(held.values())


def test_an_optimizer_of_the_parameters_without_values_is_refused() -> None:
    with penstock.lazy():
        model = Tied()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with piped(model, ids(), init=by_name) as pipe:
        pipe.step(ids())
        with pytest.raises(UsageError, match="this SGD was made before the Pipeline"):
            early.step()
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()


@pytest.mark.slow
def test_each_process_materialises_its_own_part_only() -> None:
    plain = filled(Tied(words=50))
    with torch.no_grad():
        expected = sum(square(plain(part)).item() for part in ids().chunk(2)) / 2
    first, last = on_processes(2, own_part)
    everything = {name for name, _ in plain.named_parameters()}
    assert set(first[1]) | set(last[1]) == everything
    assert set(first[1]) & set(last[1]) == {"embed.weight"}
    total = sum(parameter.numel() for parameter in plain.parameters())
    assert first[2] < 4 * total
    assert last[2] < 4 * total
    assert first[0] == pytest.approx(expected, rel=1e-6)
    assert last[0] == first[0]
