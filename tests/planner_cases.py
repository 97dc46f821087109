"""A small cluster and a small model, which several tests of the planner plan for."""

from __future__ import annotations

from functools import cache

from torch import Tensor, nn

from penstock.planner.candidates import PlanCandidate
from penstock.planner.cluster import Cluster, Device, Interconnect, Software
from penstock.planner.fake_model import profile_config, profile_module
from penstock.planner.layout import MeshLayout
from penstock.planner.plan import config_for
from penstock.planner.plans import Plans
from penstock.planner.price import Pricing
from penstock.planner.profile import Profile
from penstock.planner.ranking import SearchSpace, candidates, rank_plans
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.memory import optimizer_states

SMALL = Cluster(
    hosts=2,
    devices=4,
    device=Device(memory=10e9, peak=1e13, efficiency=0.5, bandwidth=5e11, reserved=1e8),
    inside=Interconnect(bandwidth=2e10, latency=1e-5),
    between=Interconnect(bandwidth=2e9, latency=5e-5),
)


def config() -> TrainConfig:
    return config_for(
        "gpt", batch=32, sequence=128, options={"layers": 12, "width": 512, "heads": 8, "vocabulary": 1000}
    )


@cache
def profile() -> Profile:
    return profile_config(config(), SMALL.software)


def plans(cluster: Cluster = SMALL) -> Plans:
    return rank_plans(config(), profile(), cluster)


def every_way(layout: MeshLayout, cluster: Cluster = SMALL) -> list[PlanCandidate]:
    space = SearchSpace(32, optimizer_states(config()))
    return list(candidates(layout, lambda where, rows: Pricing(profile(), cluster, where, rows), space))


class Twice(nn.Module):
    """A model whose layers are in a list, for plans of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def counted_flops(model: nn.Module, example: Tensor) -> float:
    """Forward and backward of one row, as a plan counts them."""
    profile = profile_module(model, (example,), config_for("gpt", sequence=1), Software())
    return sum(unit.forward.flops.at(1) + unit.backward.flops.at(1) for unit in profile.one)
