"""A model cut by its graph, trained through `Pipeline`.

Once the runtime had learned to ask every part for its random stream, the graph's parts had none: each such pipeline
failed at construction, while the tests of the cut, which ran the parts by hand, passed.
"""

from __future__ import annotations

import pytest
import torch
from model import nets
from model.nets import W, trains
from tiers import mostly_slow
from torch import Tensor, nn

from penstock import CutOptions
from penstock.errors import FallbackWarning
from penstock.model.cut import cut_model
from penstock.model.part import OUTPUT

ROUNDING = 1e-6


INPUTS = {
    nets.UNet: lambda: (torch.randn(4, 2, 8, 8),),
    nets.TwoInputs: lambda: (torch.randn(4, W), torch.randn(4, W)),
    nets.Tied: lambda: (torch.randint(0, 20, (4, 5)),),
}
CUTS = [(net, *cut) for net in INPUTS for cut in ((2, "1f1b"), (4, "zb-v"))]


@pytest.mark.filterwarnings("ignore::penstock.errors.CutWarning")  # what both inputs go through is in one piece
@pytest.mark.parametrize(
    ("net", "stages", "schedule"), mostly_slow(CUTS, (nets.TwoInputs, 2, "1f1b"), (nets.Tied, 4, "zb-v"))
)
def test_a_graph_trains_in_a_pipeline_as_the_plain_model(net: type[nn.Module], stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    assert (
        trains(net(), *INPUTS[net](), stages=stages, schedule=schedule, cut_options=CutOptions(method="graph"))
        <= ROUNDING
    )


class Places(nets.Chain):
    """Makes tensors in its forward, where its input is."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + torch.arange(x.shape[1], device=x.device) + torch.ones(W, device=x.device)
        return x


def test_a_stage_on_another_device_than_the_capture_makes_its_tensors_there() -> None:
    """Stages go to their devices after the model is cut. The graph had the first device written into it, so that the
    model was captured again, with its stages on several devices, which torch refuses."""
    staged = cut_model(Places(), 2, example=(torch.randn(2, W),), options=CutOptions(method="graph"))
    for part in staged.parts:
        part.module.to("meta")  # any device but the first
    x = torch.randn(4, W, device="meta")
    (crossed,) = staged.parts[0].run({}, (x,), {}).values()
    assert [tensor.device.type for tensor in crossed] == ["meta"]
    output = staged.parts[1].run({0: crossed}, (x,), {})[OUTPUT]
    assert (output.device.type, output.shape) == ("meta", (4, W))


class Stashes(nets.Chain):
    """A loss kept on a module: nothing that a replay could follow, but in a graph it is one more value."""

    def forward(self, x: Tensor) -> Tensor:
        aside = []
        handle = self.blocks[0].register_forward_hook(lambda module, args, output: aside.append(output.mean()))
        x = super().forward(x)
        handle.remove()
        return x + aside[0]


def test_what_replay_refuses_falls_back_to_the_graph_and_trains() -> None:
    torch.manual_seed(0)
    with pytest.warns(FallbackWarning, match="gives a tensor away"):
        assert trains(Stashes(), torch.randn(4, W), cut_options=CutOptions(method="auto")) <= ROUNDING
