"""A layer that two stages have must keep nothing from call to call: the order of updates would differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.by_position import SharedLayers, refuse_shared_norms


class Counting(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.calls = keeps, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps == "buffer seen":
            self.seen += 1
        if self.keeps == "attribute calls":
            self.calls += 1
        return x


def stages(layer: nn.Module) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(2, 2), layer), nn.Sequential(layer, nn.Linear(2, 2))]


def names_of(modules: list[nn.Module]) -> list[dict[str, str]]:
    return [{name: f"{index}.{name}" for name in module.state_dict()} for index, module in enumerate(modules)]


@pytest.mark.parametrize("keeps", ["buffer seen", "attribute calls"])
def test_a_shared_layer_that_keeps_something_is_refused_by_its_call(keeps: str) -> None:
    modules = stages(Counting(keeps))
    shared = SharedLayers.of(1, modules, {"0.seen": "seen"})
    assert shared is not None
    with pytest.raises(ModelError, match=f"stages 1 and 0 have one Counting, which changes its {keeps}"):
        shared.kept(lambda: modules[1](torch.ones(1, 2)))


def test_one_that_keeps_nothing_or_is_in_eval_mode_may_be_shared() -> None:
    modules = stages(Counting("nothing"))
    shared = SharedLayers.of(0, modules, {})
    assert shared is not None
    assert shared.kept(lambda: "its result") == "its result"
    modules = stages(Counting("buffer seen").eval())
    evaluated = SharedLayers.of(0, modules, {})
    assert evaluated is not None
    evaluated.kept(lambda: modules[0](torch.ones(1, 2)))
    assert SharedLayers.of(0, [nn.Linear(2, 2), nn.Linear(2, 2)], {}) is None


def test_a_shared_batch_norm_that_trains_is_refused_before_anything_runs() -> None:
    modules = stages(nn.BatchNorm1d(2))
    with pytest.raises(ModelError, match=r"layers 0\.1 and 1\.0 are one batch norm, on stages 0 and 1"):
        refuse_shared_norms(modules, names_of(modules))
    modules = stages(nn.BatchNorm1d(2).eval())
    refuse_shared_norms(modules, names_of(modules))
