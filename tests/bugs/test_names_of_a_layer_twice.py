"""A layer that is used by two stages has one name on every rank, however the model is cut.

Where the graph was cut, the later rank gave its copy the name of the later use: `named_parameters()` on that rank had a
name that the plain model has not, and an average or a log by name missed the parameter. The differential fuzz found it
on processes; on threads one process has both stages, and the first name comes first.
"""

from __future__ import annotations

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([first, nn.Linear(4, 4), first])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def names(method: str) -> list[list[str]]:
    with penstock.Pipeline(
        Twice(),
        stages=2,
        microbatches=2,
        example=(torch.randn(2, 4),),
        loss_fn=F.mse_loss,
        cut_options=penstock.CutOptions(method=method),
    ) as pipe:
        groups = pipe.parameter_groups({"layers.0.*": {"lr": 0.5}})
        count = sum(parameter.numel() for parameter in groups[0]["params"])
        return [sorted(name for name, _ in pipe.named_parameters()), list(pipe.full_state_dict()), [str(count)]]


@pytest.mark.parametrize("method", ["graph", "replay"])
def test_a_layer_of_two_stages_goes_by_its_first_name_on_both(method: str) -> None:
    first, last = on_processes(2, names, method)
    assert first[0] == ["layers.0.bias", "layers.0.weight"]
    assert last[0] == ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight"]
    assert first[1] == last[1] == list(Twice().state_dict())
    assert first[2] == last[2] == ["20"]
