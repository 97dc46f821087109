"""`penstock.compat.torchgpipe.skip`: the notation, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe
from penstock.compat.torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from penstock.model.declared_skips import waiting_skips


@skippable(stash=["foo"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("foo", x)
        return x * 2


@skippable(pop=["foo"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        foo = yield pop("foo")
        return x if foo is None else x + foo


@skippable(stash=["foo"], pop=["foo"])
class Both(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_plain_sequential_needs_no_pipeline() -> None:
    assert nn.Sequential(Stash(), nn.Identity(), Pop())(torch.tensor(42)).item() == 126
    assert not waiting_skips()


def test_namespaces_differ_and_copies_are_the_same() -> None:
    space = Namespace()
    assert space != Namespace()
    assert copy.copy(space) == space == copy.deepcopy(space)
    assert copy.copy(space) is not space
    assert len(sorted([space, Namespace()])) == 2


def test_a_layer_shows_what_it_wraps() -> None:
    assert repr(Stash()) == "@skippable(Stash())"


def test_one_name_of_several_can_be_isolated() -> None:
    @skippable(stash=["alice", "bob"])
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("alice", x)
            yield stash("bob", x * 10)
            return x * 0

    @skippable(pop=["alice", "bob"])
    class Takes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            bob = yield pop("bob")
            alice = yield pop("alice")
            return alice - bob

    a, b = Namespace(), Namespace()
    pairs = [kind().isolate(a, only=["alice"]).isolate(b, only="bob") for kind in (Two, Takes)]
    assert pairs[0].namespaces == {"alice": a, "bob": b}
    verify_skippables(nn.Sequential(*pairs))
    with pytest.raises(TypeError, match="no layer pops 'alice'"):
        verify_skippables(nn.Sequential(pairs[0], Takes().isolate(b, only="bob")))
    model = GPipe(nn.Sequential(pairs[0], nn.Identity(), pairs[1]), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
    assert model(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-9, -18, -27, -36]


@pytest.mark.parametrize(
    ("layers", "faults"),
    [
        ([Stash()], ["no layer pops 'foo' of layer '0'"]),
        ([Pop()], ["layer '0' pops 'foo', which no layer before it stashes"]),
        ([Pop(), Stash()], ["layer '0' pops 'foo'", "no layer pops 'foo'"]),
        ([Stash(), Stash(), Pop()], ["layer '1' stashes 'foo' again, after layer '0'"]),
        ([Stash(), Pop(), Pop()], ["layer '2' pops 'foo' again"]),
        ([Stash(), Pop(), Stash(), Pop()], ["layer '2' stashes 'foo' again", "layer '3' pops 'foo' again"]),
        ([Both()], ["layer '0' declares 'foo' for stash and for pop"]),
    ],
)
def test_pairs_that_do_not_match_are_named_all_at_once(layers: list[nn.Module], faults: list[str]) -> None:
    for check in (verify_skippables, lambda model: GPipe(model, [len(layers)], devices=["cpu"])):
        with pytest.raises(TypeError) as found:
            check(nn.Sequential(*layers))
        assert all(fault in str(found.value) for fault in faults)


def test_pairs_in_namespaces_match() -> None:
    a, b = Namespace(), Namespace()
    verify_skippables(nn.Sequential(Stash().isolate(a), Stash().isolate(b), Pop().isolate(a), Pop().isolate(b)))


def test_a_forward_does_what_it_declares() -> None:
    @skippable(stash=["foo"])
    class Forgets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    @skippable(pop=["foo"])
    class Leaves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    @skippable()
    class Stashes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("foo", x)

    @skippable()
    class Pops(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield pop("foo")

    @skippable(pop=["foo"])
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield pop("foo")
            yield pop("foo")

    @skippable()
    class Yields(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield 42

    x = torch.tensor(42)
    for layers, message in [
        ([Forgets()], "stashes 'foo', and its forward has not"),
        ([Stash(), Leaves()], "pops 'foo', and its forward has not"),
        ([Stashes()], "without declaring"),
        ([Pops()], "without declaring"),
        ([Stash(), Twice()], "twice"),
        ([Pop()], "no layer before it has stashed"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            nn.Sequential(*layers)(x)
    with pytest.raises(TypeError, match="yields 42"):
        Yields()(x)
    waiting_skips().clear()


def test_none_is_a_value() -> None:
    @skippable(stash=["foo"])
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("foo", None)
            return x * 2

    model = GPipe(nn.Sequential(Nothing(), nn.Identity(), Pop()), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
    assert model(torch.tensor([1.0, 2.0])).tolist() == [2, 4]


def test_nothing_of_a_batch_is_left_behind() -> None:
    for checkpoint in ("always", "never"):
        model = GPipe(nn.Sequential(Stash(), Pop()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        x = torch.rand(10, requires_grad=True)
        model(x).norm().backward()
        with torch.no_grad():
            model.eval()(x)
    assert not waiting_skips()
