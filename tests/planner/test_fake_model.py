"""Models that are built without memory: what cannot run on its data is named, with what torch says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ModelError, UsageError
from penstock.planner import counting
from penstock.planner.cluster import Cluster, Device, Software
from penstock.planner.fake_model import profile_config, profile_module
from penstock.planner.plan import config_for


def build() -> tuple[nn.Module, object]:
    """Layers that take rows of 8 numbers, and no tokens."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), nn.functional.mse_loss


def test_a_model_that_does_not_take_its_data_is_refused_with_both_named() -> None:
    config = config_for(f"{__name__}:build", sequence=16)
    with pytest.raises(ModelError, match=r"test_fake_model:build cannot run on rows of data\.source .*16.* name data"):
        profile_config(config, Software())


def test_a_module_in_memory_is_counted_on_rows_like_its_example() -> None:
    config = config_for("gpt", batch=4, sequence=1)
    model = build()[0]
    profile = profile_module(model, (torch.zeros(5, 8),), config, Software())
    assert profile.parameters == 3 * (8 * 8 + 8)
    # unit 0 is what runs before the first module, here nothing
    assert profile.counts_of((2, 3)) == (1, 1, 1)
    assert profile.cuts_of((1, 2)) == (2,)
    assert profile.names_of((2, 3)) == ("1", "2")


def test_what_precision_halves_is_counted_so() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    whole, half = (
        profile_module(Cast, (torch.zeros(2, 8),), config_for("gpt", sequence=1, precision=name), Software())
        for name in ("fp32", "bf16")
    )
    assert half.one[2].output == whole.one[2].output / 2


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[(x > 0).nonzero(as_tuple=True)[0]]


def unbuilt() -> nn.Module:
    raise KeyError("width")


def linear(**keys: object) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, **keys), nn.Linear(8, 8, **keys))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (
            nn.Sequential(linear(), Branch()),
            torch.zeros(1, 8),
            r"module '1' \(Branch\): it looks at its data .*stand-in",
        ),
        (
            nn.Sequential(linear(), Chosen()),
            torch.zeros(1, 8),
            r"module '1' \(Chosen\): it looks at .*nonzero.*stand-in",
        ),
        (linear(), torch.zeros(1, 9), r"float32 of \(1, 9\)\): in module '0' \(Linear\): .*pass inputs that the model"),
        (linear(), torch.zeros(8), r"float32 of \(8,\)\): in module '0'.*rows as their first dimension"),
        (nn.Sequential(nn.Embedding(9, 8, sparse=True), linear()), torch.zeros(1, 3).long(), "sparse=False"),
        (linear(dtype=torch.complex64), torch.zeros(1, 8, dtype=torch.complex64), "complex numbers is not priced"),
        (linear(dtype=torch.float64), torch.zeros(1, 8), r"'0' \(Linear\): .*float32 and torch.float64.* one type"),
        (unbuilt, torch.zeros(1, 8), r"unbuilt cannot be called without memory: KeyError: 'width'"),
        (nn.ReLU(), torch.zeros(1, 8), "ReLU returns no tensor with a gradient"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_its_place_and_a_remedy(
    model: nn.Module | Callable[[], nn.Module], example: Tensor, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match=said) as refused:
        penstock.plan(model, Cluster(devices=2), batch=8, example=(example,))
    assert str(refused.value).startswith(("plan(): ", "ReLU"))
    assert "fake_tensor" not in capfd.readouterr().err  # torch's own log of it


def test_an_error_of_the_counting_itself_is_not_called_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_flops", lambda *_: {}["no such formula"])
    with pytest.raises(KeyError, match="no such formula"):
        penstock.plan(linear(), Cluster(devices=2), batch=8, example=(torch.zeros(1, 8),))


def test_a_model_without_layers_to_cut_between_is_planned_with_one_stage() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    plans = penstock.plan(model, Cluster(devices=2), batch=4, example=(x,))
    assert {plan.layout.pp for plan in plans.ranked} == {1}
    alone = penstock.plan(model, Cluster(devices=1), batch=4, example=(x,)).best
    pipe = penstock.Pipeline(model, plan=alone, example=(x,), loss_fn=nn.functional.mse_loss)
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x), x)
    assert pipe.step(x, target=x).loss == loss
    small = Cluster(devices=2, device=Device(memory=1000, reserved=0))
    with pytest.raises(UsageError, match=r"pp > 1: it has no nn\.Sequential or nn\.ModuleList of layers"):
        assert penstock.plan(model, small, batch=4, example=(x,)).best


def test_no_microbatch_has_fewer_rows_than_the_model_takes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    plans = penstock.plan(model, Cluster(devices=4), batch=4, example=(torch.zeros(2, 8),), schedules=["gpipe"])
    assert plans.ranked
    assert min(plan.rows for plan in plans.ranked) == 2
    assert all(plan.layout.dp < 4 for plan in plans.ranked)  # where each replica has one row


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(UsageError, match="a function that builds one; got 5"):
        penstock.plan(5, Cluster(devices=2), example=(torch.zeros(1, 8),))  # type: ignore[arg-type]


def test_a_model_that_training_would_refuse_is_refused_in_the_same_words() -> None:
    with pytest.raises(UsageError, match="width is 64, which 7 heads cannot share evenly"):
        penstock.plan("gpt", Cluster(devices=2), options={"width": 64, "heads": 7})


@pytest.mark.slow
def test_a_model_that_no_ready_tensor_plan_matches_is_planned_without_tp(tmp_path: Path) -> None:
    """Experts have other names than the layers of the plan for Llama: nothing could be planned, with any layout."""
    from transformers import MixtralConfig

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
    MixtralConfig(**shape, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4).save_pretrained(tmp_path)
    config = config_for(f"huggingface:{tmp_path}", batch=4, sequence=16)
    profile = profile_config(config, Software())
    assert "no module matches 'model.layers.*.mlp.gate_proj'" in profile.undivided
    rows = 16 * 2  # each token goes to two of the experts
    products = 2 * 16 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 4) + 2 * rows * (32 * 96 + 48 * 32) + 4 * 16 * 16 * 32
    layer = next(unit for unit in profile.one if unit.name == "model.layers.1")
    assert layer.forward.flops.at(1) + layer.forward.spared == products
    plans = penstock.plan(config, Cluster(devices=4))
    assert {plan.layout.tp for plan in plans.ranked} == {1}
    assert any(each.startswith("without tp, because") and "gate_proj" in each for each in plans.advice)
    named = penstock.plan("gpt", Cluster(devices=2), options={"layers": 2, "width": 32, "heads": 4}, batch=4)
    assert {plan.layout.tp for plan in named.ranked} == {1, 2}
