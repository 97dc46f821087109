"""Where a GPipe is cut: by counts, by names, again for another path, and how its pieces are counted."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from compat.gpipe.plain import chunked, layers, rows
from torch import Tensor, nn

import penstock
from penstock.errors import ModelError, UsageError


class Deep(nn.Module):
    """Its depth is an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, depth: int = 4) -> Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


class Again(nn.Module):
    """One block, used four times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.block(x))
        return x


class Mixed(nn.Module):
    """Units with and without parameters: calls, units and places to cut are three numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.act, self.drop = nn.GELU(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.drop(self.act(block(x)))
        return x


class Branches(nn.Module):
    """Keeps a value on itself, which only a graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeps() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + block.kept
        return x


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x)
        return torch.tanh(x)


def test_a_tuple_is_as_good_as_a_list() -> None:
    for balance in ((2, 4), [2, 4]):
        assert penstock.GPipe(layers(), balance=balance, chunks=2).balance == [2, 4]  # cut at once
    with pytest.raises(ModelError, match="sums to 5"):
        penstock.GPipe(layers(), balance=(2, 3), chunks=2)


def test_it_is_cut_by_names() -> None:
    assert penstock.GPipe(layers(), split_at=["2", "3"], chunks=2).balance == [2, 1, 3]
    pipe = penstock.GPipe(Mixed(), split_at=["blocks.1"], chunks=2)
    torch.testing.assert_close(pipe(rows()), pipe.module(rows()))
    assert pipe.balance == [1, 4]
    inside = penstock.GPipe(nn.Sequential(layers(), layers()), split_at=["0.2"], chunks=2)
    torch.testing.assert_close(inside(rows()), inside.module(rows()))
    with pytest.raises(UsageError, match="balance= and split_at="):
        penstock.GPipe(layers(), balance=[3, 3], split_at=["2"])
    with pytest.raises(UsageError, match="stages= says 3, split_at= says 2"):
        penstock.GPipe(layers(), stages=3, split_at=["2"])


def test_pieces_are_counted_in_one_way_that_can_be_fed_back() -> None:
    """describe() counted units, .balance calls, and balance= took places to cut."""
    pipe = penstock.GPipe(Mixed(), stages=2, chunks=2)
    output = pipe(rows())
    assert pipe.balance is not None
    assert sum(pipe.balance) == 5
    again = penstock.GPipe(Mixed(), balance=pipe.balance, chunks=2)
    assert torch.equal(again(rows()), output)
    assert again.balance == pipe.balance
    whole = penstock.Pipeline(
        Mixed(), balance=pipe.balance, microbatches=2, example=(rows(),), loss_fn=nn.functional.mse_loss
    )
    first, second = whole.describe().splitlines()[1:3]
    assert [first.split()[2], second.split()[2]] == list(map(str, pipe.balance))
    assert list(whole.deployment.staged.balance) == pipe.balance
    whole.close()


@pytest.mark.slow
def test_pieces_of_a_graph_are_counted_too() -> None:
    """`.balance` was [0]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", penstock.errors.FallbackWarning)
        pipe = penstock.GPipe(Branches(), stages=2, chunks=2)
        pipe(rows())
        assert pipe._calls is not None
        assert "torch.export" in pipe._calls.split.how
        assert pipe.balance == [2, 2]
        again = penstock.GPipe(Branches(), balance=[1, 3], chunks=2)
        again(rows())
        assert again.balance == [1, 3]


@pytest.mark.filterwarnings("ignore::penstock.errors.CutWarning")  # all stages train the same block
@pytest.mark.parametrize("options", [{"stages": 2}, {"balance": [1, 1, 1, 1]}, {"split_at": ["block#2"]}])
def test_a_block_that_is_used_again_is_cut_between_its_uses(options: dict[str, object]) -> None:
    """It was refused, as a model that calls units once."""
    pipe, plain = penstock.GPipe(Again(), chunks=2, **options), Again()  # type: ignore[arg-type]
    pipe(rows()).sum().backward()
    chunked(plain, rows(), 2).sum().backward()
    torch.testing.assert_close(pipe.block.weight.grad, plain.block.weight.grad)


@pytest.mark.parametrize("depths", [(4, 3, 1, 4), pytest.param((2, 4, 1), marks=pytest.mark.slow)])
def test_a_model_whose_depth_is_an_argument(depths: tuple[int, ...]) -> None:
    """Another depth was refused, as another path than that of the first batch. What the try has changed is undone."""
    pipe, plain = penstock.GPipe(Deep().double(), stages=2, chunks=2), Deep().double()
    x = rows(dtype=torch.float64)
    for depth in depths:
        outputs = pipe(x, depth=depth), torch.cat([plain(piece, depth=depth) for piece in x.tensor_split(2)])
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(pipe.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    other, plain = copy.deepcopy(pipe).eval(), plain.eval()
    torch.testing.assert_close(other(x, depth=1), plain(x, depth=1))  # it has threads of its own
    pipe.close()


def test_calls_of_two_paths_can_be_open_at_a_time() -> None:
    pipe, plain = penstock.GPipe(Deep().double().eval(), stages=2, chunks=2), Deep().double().eval()
    x = rows(dtype=torch.float64)
    for model in (pipe, plain):
        sum(model(x, depth=depth).sum() for depth in (4, 2, 3)).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
