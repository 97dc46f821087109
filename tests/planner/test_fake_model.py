"""Models that are built without memory: what cannot run on its data is named, with what torch says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.planner.cluster import Software
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
