"""Which parameters are trained, at which rate, by which optimizer: all by their names, the same in every layout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.tools.train.build import freeze
from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.updates.optimizer import build_optimizer, build_rate, layer_shares, rate_at


class Net(nn.Module):
    """Embedding, four blocks, head: named as most language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        out: torch.Tensor = self.head(x)
        return out


def config_of(*changes: str) -> TrainConfig:
    config = load_config(None, ["optimizer.lr=0.01", "optimizer.warmup=2", "training.steps=5", *changes])
    check_consistent(config)
    return config


def made() -> Net:
    torch.manual_seed(3)
    return Net().to(torch.float64)


TUNED = [
    "training.freeze=['layers.1.*', 'embed.*', '!embed.bias']",
    "optimizer.layer_decay=0.5",
    "optimizer.groups={'head.*' = {lr = 0.02, weight_decay = 0.3}}",
]


def plain_losses(kind: Callable[..., Any], batches: list[torch.Tensor]) -> tuple[list[float], Net]:
    """The same training as a loop that anybody would write, with every rate in plain sight."""
    model = made()
    groups = []
    for name, parameter in model.named_parameters():
        if name.startswith("layers.1.") or name == "embed.weight":
            parameter.requires_grad_(False)
            continue
        layer = 0 if name.startswith("embed.") else int(name.split(".")[1]) + 1 if name.startswith("layers.") else 5
        options = {"lr": 0.01 * 0.5 ** (5 - layer), "weight_decay": 0.1 if parameter.dim() > 1 else 0.0}
        if name.startswith("head."):
            options = {"lr": 0.02, "weight_decay": 0.3}
        groups.append({"params": [parameter], **options})
    optimizer = kind(groups)
    rates = [group["lr"] for group in groups]
    found = []
    for step, x in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * rate_at(config_of(), step)
        loss = nn.functional.mse_loss(model(x), x.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model


@pytest.mark.parametrize("layout", [{"stages": 1, "ranks": 1}, {"stages": 3, "ranks": 3}])
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_frozen_and_grouped_parameters_train_as_in_a_plain_loop(layout: dict[str, int], way: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(4)]
    wanted, model = plain_losses(lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95)), batches)
    config, tuned = config_of(*TUNED, f"optimizer.implementation={way}"), made()
    freeze(tuned, config.training.freeze)
    with Pipeline(
        tuned, microbatches=4, schedule="1f1b", loss_fn=nn.functional.mse_loss, example=(batches[0][:2],), **layout
    ) as pipe:
        optimizer = build_optimizer(config, pipe)
        assert all(group[{"foreach": "foreach", "fused": "fused"}[way]] for group in optimizer.param_groups)
        rate = build_rate(config, optimizer)
        found = []
        for x in batches:
            found.append(pipe.step(x, target=x.sin()).loss.item())
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        state = pipe.full_state_dict()
    assert found == pytest.approx(wanted, rel=1e-12)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
    assert torch.equal(state["layers.1.0.weight"], made().layers[1][0].weight)  # to the bit: it was never touched


def test_patterns_that_match_nothing_are_errors_that_name_near_ones() -> None:
    with pytest.raises(UsageError, match=r"training.freeze: layer.0.\* matches none of .*12 parameters; .*layers.0.0"):
        freeze(Net(), ["embed.*", "layer.0.*"])
    with pytest.raises(UsageError, match=r'freezes all 12 parameters.*"!head.bias"'):
        freeze(Net(), ["*"])
    with Pipeline(Net(), stages=1, ranks=1, microbatches=1, example=(torch.zeros(1, 6),)) as pipe:
        config = config_of("optimizer.groups={'haed.*' = {lr = 0.1}}")
        with pytest.raises(UsageError, match=r"optimizer.groups: haed.\* matches none .*head.weight"):
            build_optimizer(config, pipe)


def test_layers_are_found_by_their_numbers() -> None:
    gpt = ["embed.token.weight", *(f"block{n}.widen.weight" for n in range(11)), "head.scores.weight"]
    shares = layer_shares(gpt, 0.5)
    assert shares["head.scores.weight"] == 1
    assert shares["block10.widen.weight"] == 0.5
    assert shares["block2.widen.weight"] == 0.5**9
    assert shares["embed.token.weight"] == 0.5**12
    nested = layer_shares(["model.embed.weight", "model.layers.0.mlp.2.weight", "model.layers.7.mlp.2.weight"], 0.1)
    assert list(nested.values()) == pytest.approx([0.1**3, 0.1**2, 0.1])
    assert list(layer_shares(["0.0.weight", "1.0.weight", "2.3.weight"], 0.1).values()) == pytest.approx(
        [1e-3, 1e-2, 0.1]
    )
    with pytest.raises(UsageError, match=r"no numbered list of layers.*\(first.weight, second.weight\).*groups"):
        layer_shares(["first.weight", "second.weight"], 0.9)


def test_wsd_holds_the_rate_and_then_lets_it_fall() -> None:
    settings = ["training.steps=20", "optimizer.warmup=4", "optimizer.decay=wsd", "optimizer.final=0"]
    shares = [rate_at(load_config(None, [*settings, "optimizer.decay_share=0.25"]), step) for step in range(20)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4:15] == [1.0] * 11
    assert shares[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


def test_eight_bits_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("optimizer.name=adamw8bit", "optimizer.layer_decay=0.5")
    with Pipeline(Net(), stages=1, ranks=1, microbatches=1, example=(torch.zeros(1, 6),)) as pipe:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
        with pytest.raises(UsageError, match=r'"adamw8bit", which needs bitsandbytes.*pip install bitsandbytes'):
            build_optimizer(config, pipe)
        there = ModuleType("bitsandbytes.optim")
        there.AdamW8bit = torch.optim.AdamW  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
        monkeypatch.setitem(sys.modules, "bitsandbytes.optim", there)
        groups = build_optimizer(config, pipe).param_groups
    assert sorted(group["lr"] for group in groups)[-1] == 0.01
    assert {group["betas"] for group in groups} == {(0.9, 0.95)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["optimizer.groups={'a' = {rate = 1}}"], r'groups."a" has rate; .*adamw has lr, weight_decay, betas, eps'),
        (["optimizer.groups={'a' = {lr = -1}}"], r'groups."a".lr is -1; it takes a finite number, 0 or more'),
        (["optimizer.groups={'a' = 3}"], "takes a table of options"),
        (["optimizer.name=adamw8bit", "optimizer.implementation=fused"], "adamw8bit has one implementation"),
        (["optimizer.name=adamw8bit", "mesh.replicas=2", "mesh.replicate=fsdp"], "does not know sharded parameters"),
        (["training.ema=1"], "would never change"),
        (["evaluation.patience=2", "evaluation.every=0"], "evaluation.every is 0"),
        (["logging.callback=mine"], 'a function is written "module:function"'),
        (["logging.wandb_options={project='p'}"], 'logging.wandb is "off"'),
        (["optimizer.layer_decay=1.5"], "above 0, up to 1"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config_of(*changes)


def test_the_rate_rises_and_falls() -> None:
    config = load_config(None, ["training.steps=11", "optimizer.warmup=2", "optimizer.final=0.1"])
    shares = [rate_at(config, step) for step in range(11)]
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert shares[-1] == pytest.approx(0.1)
    assert all(after <= before for before, after in pairwise(shares[1:]))
    fall = ["optimizer.decay=linear", "optimizer.final=0"]
    linear = load_config(None, ["training.steps=3", "optimizer.warmup=0", *fall])
    assert [rate_at(linear, step) for step in range(3)] == [1.0, 0.5, 0.0]
    flat = load_config(None, ["optimizer.warmup=0", "optimizer.decay=constant"])
    assert rate_at(flat, 150) == 1.0
