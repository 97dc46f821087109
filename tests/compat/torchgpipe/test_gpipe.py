"""`penstock.compat.torchgpipe.GPipe`: training scripts of torchgpipe's users, with the import changed."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat.torchgpipe.models import CHUNKS, cells, convolutions, in_chunks, linear, train, two, unet
from tiers import by_turns
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe, is_checkpointing, is_recomputing

# -- training


MODELS = [(convolutions, [3, 3, 2]), (unet, [2, 1, 2, 3]), (unet, [7, 1]), (cells, [1, 2, 2, 2])]


@pytest.mark.parametrize(
    ("build", "balance", "checkpoint", "rows"),  # 9 rows in 4 chunks make 3, as with torchgpipe
    by_turns(
        MODELS,
        ["always", "except_last", "never"],
        [8, 9],
        fast=[(*MODELS[0], "except_last", 9), (*MODELS[1], "never", 9), (*MODELS[3], "always", 9)],
        one_in=3,
    ),
)
def test_a_script_trains_with_the_losses_of_a_plain_loop(
    build: Callable[[], nn.Sequential], balance: list[int], checkpoint: str, rows: int
) -> None:
    plain = build()
    model = GPipe(build(), balance, devices=["cpu"] * len(balance), chunks=CHUNKS, checkpoint=checkpoint)
    assert train(model, model, rows) == pytest.approx(train(plain, in_chunks(plain), rows), rel=1e-12)
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("rows", [8, 9])
def test_deferred_batch_norm_has_the_statistics_of_whole_batches(rows: int) -> None:
    model = GPipe(convolutions(), [2, 6], devices=["cpu"] * 2, chunks=CHUNKS, deferred_batch_norm=True)
    plain = convolutions()
    losses = train(model, model, rows, steps=1)
    assert losses == pytest.approx(train(plain, in_chunks(plain), rows, steps=1), rel=1e-12)
    whole = convolutions()
    train(whole, whole, rows, steps=1)
    torch.testing.assert_close(model[1].running_mean, whole[1].running_mean)
    torch.testing.assert_close(model[1].running_var, whole[1].running_var)
    assert model[1].num_batches_tracked == 1


def test_pairs_of_tensors_go_in_and_come_out() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = linear(), linear()

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return self.one(pair[0]) + pair[1].mean(), self.other(pair[1])

    model = GPipe(nn.Sequential(Two(), Two()), [1, 1], devices=["cpu"] * 2, chunks=3)
    a, b = torch.rand(6, 1, requires_grad=True), torch.rand(12, 1, requires_grad=True)  # 2 and 4 rows per microbatch
    outputs = model((a, b))
    assert type(outputs) is tuple
    assert [len(each) for each in outputs] == [6, 12]
    (outputs[0].sum() + outputs[1].square().sum()).backward()
    mine = [a.grad, b.grad, *(parameter.grad for parameter in model.parameters())]
    a.grad = b.grad = None
    plain = copy.deepcopy(nn.Sequential(*model))
    plain.zero_grad()
    pieces = [plain(pair) for pair in zip(a.chunk(3), b.chunk(3), strict=True)]
    sum(one.sum() + other.square().sum() for one, other in pieces).backward()
    for have, want in zip(mine, [a.grad, b.grad, *(each.grad for each in plain.parameters())], strict=True):
        torch.testing.assert_close(have, want)
    with pytest.raises(ValueError, match="6, 4 rows"):
        model((torch.rand(6, 1), torch.rand(4, 1)))


def test_layers_see_whether_they_are_checkpointed_or_run_again() -> None:
    seen = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x * 2

    model = GPipe(nn.Sequential(linear(), Looks()), [2], devices=["cpu"], chunks=2)
    model(torch.rand(4, 1)).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]
    model.eval()(torch.rand(4, 1)).sum().backward()
    assert seen[3:] == [(False, False)] * 2


def test_an_error_of_a_layer_comes_out_as_it_is() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    model = GPipe(nn.Sequential(linear(), Fails()), [1, 1], devices=["cpu"] * 2, chunks=3)
    with pytest.raises(KeyError, match="mine"):
        model(torch.rand(3, 1))


# -- what it has


def test_signature_and_defaults_are_torchgpipes() -> None:
    parameters = inspect.signature(GPipe).parameters
    assert list(parameters) == ["module", "balance", "devices", "chunks", "checkpoint", "deferred_batch_norm"]
    assert [each.default for each in parameters.values()][1:] == [None, None, 1, "except_last", False]
    assert two().chunks == 1


def test_attributes_are_converted_and_spare_devices_dropped() -> None:
    model = GPipe(nn.Sequential(linear(), linear()), (1, 1), devices=("cpu",) * 5, chunks=3.0)  # type: ignore[arg-type]
    assert model.balance == [1, 1]
    assert model.devices == [torch.device("cpu")] * 2
    assert type(model.chunks) is int


def test_it_is_a_sequence_of_layers_in_partitions() -> None:
    layers = OrderedDict(a=linear(), b=linear(), c=linear())
    model = GPipe(nn.Sequential(layers), iter([2, 1]), devices=["cpu"] * 2)
    a, b, c = layers.values()
    assert len(model) == 3
    assert list(model) == [a, b, c]
    assert (model[0], model[2], model[-1], model[-3]) == (a, c, c, a)
    with pytest.raises(IndexError):
        model[3]
    assert isinstance(model.partitions, nn.ModuleList)
    assert [list(partition) for partition in model.partitions] == [[a, b], [c]]
    assert "partitions.1.c" in dict(model.named_modules())
    with pytest.raises(AttributeError):
        _ = model.a


def test_hooks_on_partitions_and_replaced_layers_count() -> None:
    model, seen = two(chunks=2), []
    model.partitions[1].register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    with torch.no_grad():
        model(torch.rand(4, 1))
    assert seen == [False, False]
    model.partitions[0][0] = nn.Linear(1, 1)
    x = torch.rand(4, 1)
    torch.testing.assert_close(model(x), model[1](model[0](x)))
    model.partitions[1] = nn.Sequential(nn.Linear(1, 3))
    torch.testing.assert_close(model(x), model[1](model[0](x)))


def test_old_checkpoints_load_and_other_balances_too() -> None:
    model = GPipe(convolutions(), [3, 5], devices=["cpu"] * 2, chunks=2, deferred_batch_norm=True)
    keys = list(model.state_dict())
    assert keys[:2] == ["partitions.0.0.weight", "partitions.0.0.bias"]
    assert "partitions.1.7.weight" in keys
    assert {"partitions.0.1.sum", "partitions.0.1.sum_squares"} <= set(keys)
    train(model, model, steps=1)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    same = GPipe(convolutions(), [3, 5], devices=["cpu"] * 2, deferred_batch_norm=True)
    other = GPipe(convolutions(), [1, 1, 6], devices=["cpu"] * 3, deferred_batch_norm=True)
    for each in (same, other):
        assert str(each.load_state_dict(saved)) == "<All keys matched successfully>"
        for have, want in zip(each.state_dict().values(), saved.values(), strict=True):
            assert torch.equal(have, want)
    inside = nn.ModuleDict({"net": other})
    inside.load_state_dict({f"net.{name}": value for name, value in saved.items()})
    with pytest.raises(RuntimeError, match=r"partitions\.0\.9\.weight"):
        same.load_state_dict({**saved, "partitions.0.9.weight": torch.zeros(1)})


def test_copies_are_models_of_their_own() -> None:
    model = GPipe(unet(), [4, 4], devices=["cpu"] * 2, chunks=2, deferred_batch_norm=True)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    before = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), before)
        assert list(other.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert not torch.equal(other(x), before)
    assert torch.equal(model(x), before)


def test_an_empty_model_returns_its_input() -> None:
    model = GPipe(nn.Sequential(), [])
    assert model(torch.tensor(42)) == 42
    assert model((torch.tensor(42),)) == (torch.tensor(42),)
    with pytest.raises(TypeError):
        model(42)


# -- what is refused


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cpu(),
        lambda model: model.cuda(),
        lambda model: model.to("cpu"),
        lambda model: model.to(0),
        lambda model: model.to(torch.device("cpu"), torch.float64),
        lambda model: model.to(device=0),
        lambda model: model.to(torch.rand(1)),
        lambda model: model.to(tensor=torch.rand(1)),
    ],
)
def test_it_does_not_move(move: Callable[[GPipe], Any]) -> None:
    with pytest.raises(TypeError, match="own device"):
        move(two())


def test_its_precision_can_change() -> None:
    model = two(chunks=2)
    model.half()
    model.to(torch.double)
    assert model(torch.rand(4, 1, dtype=torch.double)).dtype is torch.double
    assert model.to(dtype=torch.float)(torch.rand(4, 1)).dtype is torch.float
