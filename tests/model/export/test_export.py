"""The graph fallback against the plain model: outputs, gradients and buffers, parts run by hand."""

from __future__ import annotations

import copy
import itertools
import re
import threading
from typing import Any

import pytest
import torch
from graph_models import MODELS, WIDTH, Block, Scores, Trunk, make, rows
from tiers import mostly_slow
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.model.export.cut import split_by_graph
from penstock.model.part import OUTPUT
from penstock.model.staged_model import StagedModel


def run(split: StagedModel, *args: Any, **kwargs: Any) -> Any:
    payloads: dict[tuple[int, int], Any] = {}
    for part in split.parts:
        arrived = {stage: payloads.pop((stage, part.index)) for stage in split.topology.producers(part.index)}
        for reader, payload in part.run(arrived, args, kwargs).items():
            payloads[part.index, reader] = payload
    assert list(payloads) == [(split.stages - 1, OUTPUT)], "every payload has its reader"
    return payloads[split.stages - 1, OUTPUT]


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Scores):
        value = [value.logits, value.extra]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def backward(value: Any) -> None:
    sum(tensor.sin().sum() for tensor in tensors(value) if tensor.requires_grad).backward()


def check_equal(split: StagedModel, model: nn.Module, plain: nn.Module, batch: tuple[Any, ...]) -> None:
    torch.manual_seed(3)
    expected = plain(*copy.deepcopy(batch))
    torch.manual_seed(3)
    found = run(split, *copy.deepcopy(batch))
    assert type(found) is type(expected)
    assert len(tensors(found)) == len(tensors(expected)) > 0
    for mine, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(mine, theirs)
    backward(expected)
    backward(found)
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-6, atol=1e-7)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name


@pytest.mark.parametrize(
    ("name", "stages"),
    mostly_slow(itertools.product(MODELS, (2, 4)), ("tied", 4), ("dropout", 2)),
)
def test_outputs_gradients_and_buffers_are_those_of_the_plain_model_over_two_steps(name: str, stages: int) -> None:
    model, batch = make(name)
    plain, _ = make(name)
    split = split_by_graph(model, stages, batch(4))
    assert split.stages == stages
    for count in (4, 3):
        check_equal(split, model, plain, batch(count))


@pytest.mark.parametrize("name", mostly_slow(["tied", "buffers"], "tied"))
def test_every_parameter_and_buffer_is_held_under_its_own_name_and_is_the_users_own(name: str) -> None:
    model, batch = make(name)
    split = split_by_graph(model, 3, batch(4))
    held: dict[str, Tensor] = {}
    for part in split.parts:
        for own, tensor in [*part.module.named_parameters(), *part.module.named_buffers()]:
            held[part.names[own]] = tensor
    expected = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    assert held.keys() == {full for full, _ in expected}
    assert all(held[full] is tensor for full, tensor in expected)
    saved = {part.names[own] for part in split.parts for own in part.module.state_dict()}
    assert saved == set(model.state_dict())


@pytest.mark.slow
def test_a_tied_parameter_is_held_by_both_stages_under_the_name_that_each_uses() -> None:
    model, batch = make("tied")
    split = split_by_graph(model, 2, batch(4))
    first, last = (dict(part.module.named_parameters()) for part in split.parts)
    assert first["embedding.weight"] is last["head.weight"]
    assert "head.weight" not in first
    assert "embedding.weight" not in last


def normed() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def test_evaluation_is_captured_when_it_is_first_needed() -> None:
    model, batch = normed(), rows(4, WIDTH)()
    plain = copy.deepcopy(model)
    split = split_by_graph(model, 2, (batch,))
    for part in split.parts:
        part.module.eval()
    with torch.no_grad():
        assert torch.equal(run(split, batch), plain.eval()(batch))
    assert all(module.training for module in model.modules())
    for part in split.parts:
        part.module.train()
    check_equal(split, model, plain.train(), (batch,))


@pytest.mark.slow
def test_modules_that_were_in_another_mode_than_the_model_stay_in_it() -> None:
    model, batch = normed(), rows(4, WIDTH)()
    model[1].eval()
    plain = copy.deepcopy(model)
    check_equal(split_by_graph(model, 2, (batch,)), model, plain, (batch,))


@pytest.mark.slow
def test_a_single_row_is_captured_anew_because_a_captured_size_excludes_one() -> None:
    class Branches(Trunk):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x)
            return out if x.shape[0] == 1 else out * 2

    model = Branches()
    plain = copy.deepcopy(model)
    split = split_by_graph(model, 2, (torch.randn(4, WIDTH),))
    for count in (1, 4):
        check_equal(split, model, plain, (torch.randn(count, WIDTH),))


@pytest.mark.slow
def test_under_autocast_it_is_captured_anew_because_types_are_in_the_graph() -> None:
    class Casts(Trunk):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return torch.cat([out.to(x.dtype), self.head.weight.sum().to(out.dtype).expand(len(x), 1)], 1)

    model = Casts()
    plain = copy.deepcopy(model)
    split = split_by_graph(model, 2, (torch.randn(4, WIDTH),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_equal(split, model, plain, (torch.randn(4, WIDTH),))


@pytest.mark.slow
def test_stages_on_threads_that_need_a_new_capture_at_once_make_one() -> None:
    model, batch = make("dropout")
    split = split_by_graph(model.eval(), 2, batch(4))
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(run(split, *batch(1)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(torch.equal(each, model(*batch(1))) for each in found)


@pytest.mark.slow
def test_inputs_may_be_given_by_place_or_by_name_and_a_new_one_is_captured_anew() -> None:
    model, batch = make("two inputs")
    split = split_by_graph(model, 2, batch(4))
    left, right = batch(4)
    expected = model(left, right).logits
    assert torch.equal(run(split, left, right=right, mask=None).logits, expected)
    assert torch.equal(run(split, right=right, left=left, scale=1.0).logits, expected)
    assert torch.equal(run(split, left, right, scale=3.0).logits, model(left, right, scale=3.0).logits)
    mask = torch.ones(4, 3).tril()
    found = run(split, left, right, mask=mask)
    assert torch.equal(found.logits, model(left, right, mask=mask).logits)
    assert (found.name, found.extra[1]) == ("both", 3)
    assert found.extra[0] is left


@pytest.mark.slow
def test_values_go_straight_to_the_stage_that_reads_them() -> None:
    model, batch = make("unet")
    split = split_by_graph(model, None, batch(4), split_at=["down.1", "bottom", "up.1"])
    assert split.topology.edges == ((0, 1), (0, 2), (1, 2), (2, 3)), "the concatenation stands before up.1"


@pytest.mark.slow
def test_a_cut_by_name_and_by_counts() -> None:
    model, batch = make("dropout")
    named = split_by_graph(model, 2, batch(4), split_at=["blocks.3"])
    assert {name.split(".")[0:2][-1] for name in named.parts[1].names} == {"3", "weight", "bias"}
    counted = split_by_graph(model, None, batch(4), balance=[1, 7, 1])
    assert set(counted.parts[0].names) == {"blocks.0.norm.weight", "blocks.0.norm.bias"}
    assert set(counted.parts[2].names) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", mostly_slow(["stashes", "hooks", "in place", "buffers"], "stashes"))
def test_the_users_model_is_left_as_it_was(name: str) -> None:
    model, batch = make(name)
    state = copy.deepcopy(model.state_dict())
    attributes = {module: dict(vars(module)) for module in model.modules()}
    given = batch(4)
    before = copy.deepcopy(given)
    generator = torch.get_rng_state()
    run(split_by_graph(model, 2, given), *given)
    assert torch.equal(generator, torch.get_rng_state())
    for module, known in attributes.items():
        assert vars(module).keys() == known.keys()
        assert [key for key, value in known.items() if vars(module)[key] is not value] == []
    assert getattr(model, "features", []) == []
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True)), "the batch is not written into"
    assert state.keys() == model.state_dict().keys()


def refused(model: nn.Module, *args: Any, stages: int = 2, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        split_by_graph(model, stages, args or (torch.randn(4, WIDTH),), **options)
    return str(caught.value)


class Decides(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Remembers(Block):
    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) if self.memory is None else super().forward(x) + self.memory
        self.memory = out.detach()
        return out


class Steps(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Adds(Block):
    """Writes into a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x) + self.seen


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Reverses(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(super().forward(x))


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Decides, ["module 'blocks.2' (Decides)", "depends on the values of a tensor", "torch.where", "stage modules"]),
        (Remembers, ["self.blocks.2.memory", "next call", "buffer"]),
        (Steps, ["self.blocks.2.calls", "next call"]),
        (Adds, ["writes into self.blocks.2.seen", "no buffer", "stage modules"]),
        (Reverses, ["module 'blocks.2' (Reverses)", "autograd.Function Reversed", "custom_op"]),
    ],
)
def test_what_a_graph_would_get_wrong_is_refused_with_the_module(block: type[nn.Module], words: list[str]) -> None:
    model = Trunk()
    model.blocks[2] = block()
    message = refused(model)
    for word in words:
        assert word in message
    assert not hasattr(model.blocks[2], "memory") or model.blocks[2].memory is None


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("(?s)8 places to cut.*stages=9 or fewer", {"stages": 12}),
    ("near: blocks.3", {"split_at": ["block.3"]}),
    ("sums to 4", {"balance": [2, 2]}),
    ("order", {"stages": 3, "split_at": ["blocks.3", "blocks.1"]}),
    ("2 names", {"stages": 2, "split_at": ["blocks.1", "blocks.3"]}),
    ("balance='time'", {"balance": "time"}),
]


@pytest.mark.parametrize(("words", "request_"), mostly_slow(REQUESTS, *REQUESTS[:2]))
def test_bad_requests_are_named(words: str, request_: dict[str, Any]) -> None:
    assert re.search(words, refused(Trunk(), **request_))


@pytest.mark.slow
def test_a_buffer_that_changes_is_never_on_two_stages() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.norm(self.two(self.norm(self.one(x)))))

    model = Shared()
    plain = copy.deepcopy(model)
    split = split_by_graph(model, 3, (torch.randn(4, WIDTH),))
    assert sum("norm.running_mean" in part.names for part in split.parts) == 1
    check_equal(split, model, plain, (torch.randn(4, WIDTH),))
    assert "too few for 4 stages" in refused(Shared(), stages=4)
