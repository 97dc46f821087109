"""What goes into a GPipe and comes out of it: any pytree, with gradients or without."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from compat.gpipe.plain import assert_gradients_of_its_module, assert_same_gradients, chunked, layers, rows
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, RunError

CHECKPOINTS = ["never", "except_last", "always"]


class Both(NamedTuple):
    left: Tensor
    right: Tensor


class Two(nn.Module):
    """A layer from a pair to a pair, of which one half has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.layer(pair[0])), pair[1]


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
        y = self.layer(pair[0]) * pair[1].unsqueeze(1)
        return {"y": y, "both": Both(y.detach(), y.sum(1)), "best": y.argmax(1), "none": None, "name": "pair"}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_pytrees_go_in_and_come_out(checkpoint: str) -> None:
    torch.manual_seed(0)
    pipe = penstock.GPipe(nn.Sequential(Two(), Two(), Last()), balance=[1, 1, 1], chunks=3, checkpoint=checkpoint)
    x, mask = rows(7, requires_grad=True), torch.arange(7) % 2
    found, wanted = pipe((x, mask)), pipe.module((x, mask))
    assert list(found) == list(wanted)
    assert isinstance(found["both"], Both)
    assert (found["none"], found["name"]) == (None, "pair")
    assert not found["both"].left.requires_grad
    assert found["best"].dtype is torch.int64
    for have, want in ((found["y"], wanted["y"]), *zip(found["both"], wanted["both"], strict=True)):
        torch.testing.assert_close(have, want)
    (found["y"].pow(2).sum() + found["both"].right.sum()).backward()
    have = [x.grad, *(parameter.grad for parameter in pipe.parameters())]
    x.grad = None
    pipe.zero_grad()
    (wanted["y"].pow(2).sum() + wanted["both"].right.sum()).backward()
    for one, other in zip(have, [x.grad, *(parameter.grad for parameter in pipe.parameters())], strict=True):
        torch.testing.assert_close(one, other)


def test_only_some_outputs_are_used() -> None:
    pipe = penstock.GPipe(nn.Sequential(Two(), Last()), balance=[1, 1], chunks=2)
    pipe((rows(), torch.ones(8)))["both"].right[:2].sum().backward()  # of the first microbatch alone
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_ids_go_in_and_a_gradient_that_nobody_wants_is_none() -> None:
    torch.manual_seed(0)
    embed = nn.Embedding(10, 8, sparse=True)
    pipe = penstock.GPipe(nn.Sequential(embed, nn.Linear(8, 8), nn.Linear(8, 3)), balance=[1, 1, 1], chunks=4)
    ids = torch.randint(0, 10, (8, 5))
    pipe(ids).sum().backward()
    assert embed.weight.grad is not None
    assert embed.weight.grad.is_sparse
    have = embed.weight.grad.to_dense()
    pipe.zero_grad()
    pipe.module(ids).sum().backward()
    torch.testing.assert_close(have, embed.weight.grad.to_dense())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_frozen_front_gets_nothing_and_the_rest_everything(checkpoint: str) -> None:
    plain, pipe = layers(), penstock.GPipe(layers(), balance=[2, 2, 2], chunks=4, checkpoint=checkpoint)
    for model in (plain, pipe):
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
    x = rows()
    pipe(x).sum().backward()
    chunked(plain, x, 4).sum().backward()
    assert_same_gradients(pipe, plain)
    assert pipe[0].weight.grad is None
    for parameter in pipe.parameters():
        parameter.requires_grad_(False)
    assert not pipe(x).requires_grad


class Detaches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def test_a_detached_middle_stops_the_gradient() -> None:
    pipe = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Detaches(), nn.Linear(8, 8)), balance=[1, 1, 1], chunks=2)
    pipe(rows()).sum().backward()
    assert pipe[0].weight.grad is None
    assert pipe[2].weight.grad is not None
    detached = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Detaches()), balance=[1, 1], chunks=2)
    assert not detached(rows()).requires_grad


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_layers_may_write_in_place_also_into_the_input(checkpoint: str) -> None:
    """An in-place ReLU breaks a recomputed stage. Here the user's tensor stays as it is, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    pipe = penstock.GPipe(model, balance=[2, 2], chunks=4, checkpoint=checkpoint)
    x = rows(requires_grad=True)
    for _ in range(2):
        before, source = x.detach().clone(), x * 1.0
        x.grad = None
        pipe.zero_grad()
        pipe(source).sum().backward()
        assert torch.equal(source, before)
        found = [x.grad, *(parameter.grad for parameter in pipe.parameters())]
        x.grad = None
        pipe.zero_grad()
        model(x * 1.0).sum().backward()
        for have, want in zip(found, [x.grad, *(p.grad for p in pipe.parameters())], strict=True):
            torch.testing.assert_close(have, want)
    pipe(rows())  # data that wants no gradient


class Closure(nn.Module):
    """Uses a tensor that wants a gradient and is no parameter of anything."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = [scale]  # hidden from nn.Module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.scale[0] if self.scale else y


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_tensor_that_is_no_parameter_gets_its_gradient(checkpoint: str) -> None:
    scale = torch.ones(8, requires_grad=True)
    pipe = penstock.GPipe(
        nn.Sequential(nn.Linear(8, 8), Closure(scale)), balance=[1, 1], chunks=4, checkpoint=checkpoint
    )
    pipe[1].scale.clear()
    pipe(rows()).sum().backward()
    pipe[1].scale.append(scale)  # from the second call on
    for _ in range(2):
        scale.grad = None
        pipe(rows()).sum().backward()
        have, scale.grad = scale.grad, None
        pipe.module(rows()).sum().backward()
        torch.testing.assert_close(have, scale.grad)


def test_one_layer_in_two_stages_gets_one_sum() -> None:
    torch.manual_seed(0)
    twice = nn.Linear(8, 8)
    pipe = penstock.GPipe(nn.Sequential(twice, nn.Tanh(), twice), balance=[2, 1], chunks=4)
    assert len(list(pipe.parameters())) == 2
    assert_gradients_of_its_module(pipe)


def test_rows_may_be_in_another_dimension() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GRU(8, 8), Recurrent())
    pipe = penstock.GPipe(
        model, balance=[1, 1], chunks=3, batch_options=penstock.BatchOptions(dims={0: 1, "output": 1})
    )
    x = torch.randn(5, 7, 8, requires_grad=True)
    y = pipe(x)
    torch.testing.assert_close(y, model(x))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


class Recurrent(nn.Module):
    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0]


def test_shared_values_get_the_sum_of_all_microbatches() -> None:
    class Adds(nn.Module):
        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            return given[0] + given[1]

    table = torch.zeros(8, requires_grad=True)
    pipe = penstock.GPipe(nn.Sequential(Adds(), nn.Linear(8, 8)), balance=[1, 1], chunks=4)
    pipe((rows(), penstock.Shared(table))).sum().backward()
    have, table.grad = table.grad, None
    pipe.module((rows(), table)).sum().backward()
    torch.testing.assert_close(have, table.grad)


def test_tuples_that_do_not_agree_in_rows_are_refused() -> None:
    """A tuple of different lengths was cut short in silence."""
    pipe = penstock.GPipe(nn.Sequential(Two(), Last()), balance=[1, 1], chunks=2)
    with pytest.raises(ModelError, match="7 rows along dimension 0, but argument 0 has 8"):
        pipe((rows(8), torch.ones(7)))
    with pytest.raises(ModelError, match="0 rows"):
        pipe((rows(0), torch.ones(0)))


def test_an_output_that_hides_tensors_is_refused() -> None:
    class Hides(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return type("Result", (), {})() if x is None else Result(x)

    class Result:
        def __init__(self, y: Tensor) -> None:
            self.y = y

    pipe = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Hides()), balance=[1, 1], chunks=2)
    with pytest.raises(ModelError, match="does not know as a container"):
        pipe(rows())


def test_add_loss_is_refused_because_there_is_no_loss() -> None:
    class Adds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            penstock.add_loss("balance", x.mean())
            return super().forward(x)

    pipe = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Adds(8, 8)), balance=[1, 1], chunks=2)
    with pytest.raises(RunError, match="return the value as an output"):
        pipe(rows())


def test_a_ragged_batch_keeps_its_order() -> None:
    pipe = penstock.GPipe(nn.Sequential(nn.Identity(), nn.Identity()), balance=[1, 1], chunks=4)
    for count in (1, 3, 4, 5, 9, 11):
        assert torch.equal(pipe(torch.arange(count)), torch.arange(count))
    assert F.mse_loss(pipe(rows()), rows()) == 0
