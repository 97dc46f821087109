"""What a process owns of the model, under the model's own names: parameters, buffers, states that load and save."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from pipeline.nets import sequential
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError


@pytest.mark.filterwarnings("ignore::penstock.errors.CutWarning")  # a stage of a Tanh
@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": 4}, {"balance": [3, 1]}, {"stages": 1}])
def test_names_are_those_of_the_whole_model(options: dict[str, Any]) -> None:
    model = sequential()
    pipe = penstock.Pipeline(model, microbatches=2, loss_fn=F.mse_loss, **options)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for (_, a), (_, b) in zip(pipe.named_parameters(), model.named_parameters(), strict=True))
    assert [name for name, _ in pipe.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_names_of_a_list_of_stages_are_those_of_a_module_list() -> None:
    modules = list(sequential())
    pipe = penstock.Pipeline(modules, microbatches=2, loss_fn=F.mse_loss)
    assert list(pipe.state_dict()) == list(nn.ModuleList(modules).state_dict())


def test_a_checkpoint_of_the_plain_model_loads_and_ours_loads_there() -> None:
    plain, model = sequential(), sequential()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    pipe = penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=F.mse_loss)
    pipe.load_state_dict(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    x = torch.randn(4, 4)
    pipe.step(x, target=x)
    other = sequential()
    other.load_state_dict(pipe.state_dict())


def test_a_state_that_does_not_fit_is_an_error_that_names_what_is_missing_and_unknown() -> None:
    pipe = penstock.Pipeline(sequential(), stages=2, microbatches=2, loss_fn=F.mse_loss)
    state = pipe.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    wrong = {**state, "other.weight": torch.ones(1)}
    del wrong["3.bias"]
    with pytest.raises(ModelError, match=r"missing \['3.bias'\], unknown \['other.weight'\]"):
        pipe.load_state_dict({name: value + 1 for name, value in wrong.items()})
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_a_state_of_other_shapes_is_refused_before_anything_is_loaded() -> None:
    pipe = penstock.Pipeline(sequential(), stages=2, microbatches=2, loss_fn=F.mse_loss)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    shape = tuple(before["3.bias"].shape)
    wrong = {name: value + 1 for name, value in before.items()} | {"3.bias": torch.ones(7)}
    with pytest.raises(ModelError, match=re.escape(f"of another shape ['3.bias (7,), not {shape}']")):
        pipe.load_state_dict(wrong)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_a_layer_that_loads_other_shapes_in_its_own_way_may() -> None:
    class Cropped(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
            state[prefix + "weight"] = state[prefix + "weight"][: self.out_features]
            super()._load_from_state_dict(state, prefix, *others)

    pipe = penstock.Pipeline([Cropped(2, 2), nn.Linear(2, 2)], microbatches=2, loss_fn=F.mse_loss)
    pipe.load_state_dict({**pipe.state_dict(), "0.weight": torch.arange(6.0).reshape(3, 2)})
    assert torch.equal(pipe.state_dict()["0.weight"], torch.arange(4.0).reshape(2, 2))


def test_state_that_only_the_module_knows_is_saved_and_loaded() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    stages = [Counting(2, 2), Counting(2, 2)]
    stages[0].count, stages[1].count = 3, 4
    pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    state = pipe.state_dict()
    assert list(state) == list(nn.ModuleList(stages).state_dict())
    stages[0].count = stages[1].count = 0
    pipe.load_state_dict(state)
    assert (stages[0].count, stages[1].count) == (3, 4)


def test_a_parameter_tied_between_stages_is_listed_once_and_gets_both_gradients() -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4) for _ in range(4)]
    stages[3].weight = stages[0].weight
    pipe = penstock.Pipeline(stages, microbatches=2, schedule="zb-v", loss_fn=F.mse_loss)
    assert [name for name, _ in pipe.named_parameters()].count("3.weight") == 0
    x = torch.randn(4, 4)
    pipe.step(x, target=x)
    found = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    pipe.zero_grad()
    F.mse_loss(nn.Sequential(*stages)(x), x).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in pipe.parameters()])


@pytest.mark.filterwarnings("ignore::penstock.errors.CutWarning")  # a stage of a Tanh
def test_buffers_after_the_first_step_are_those_of_the_plain_loop() -> None:
    model, plain = sequential(), sequential()
    pipe = penstock.Pipeline(model, stages=4, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(6, 4)
    for _ in range(2):
        pipe.step(x, target=x)
        for rows in x.split(3):
            plain(rows)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_train_and_eval_set_the_mode_of_all_stages() -> None:
    pipe = penstock.Pipeline([nn.Dropout(0.9), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss)
    x = torch.ones(4, 4)
    pipe.eval()
    assert torch.equal(pipe.step(x, target=x, outputs=True).output, pipe.predict(x))
    pipe.train()
    assert not torch.equal(pipe.step(x, target=x, outputs=True).output, pipe.predict(x))
