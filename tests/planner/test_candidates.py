"""The memory of a candidate, counted without any, beside what the tensors of real passes take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiers import in_tiers

from penstock.planner.calibration import candidate_of
from penstock.planner.candidates import PlanCandidate
from penstock.planner.cluster import Cluster
from penstock.planner.fake_model import profile_config
from penstock.planner.layout import MeshLayout
from penstock.planner.plan import config_for
from penstock.planner.price import Pricing
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.run.activations import measure_peaks

WAYS = [("gpipe", 2, 2), ("gpipe", 2, 4), ("1f1b", 2, 4), ("interleaved-1f1b", 4, 4), ("zb-h1", 2, 4), ("zb-v", 4, 4)]
CASES = [(*way, vocabulary) for way in WAYS for vocabulary in (300, 4000)]


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "vocabulary"),
    in_tiers(CASES, CASES[3::8], CASES[1::4] + CASES[2::4]),  # small and large ones by turns
)
def test_a_plan_counts_what_the_passes_of_a_step_allocate(
    schedule: str, stages: int, microbatches: int, vocabulary: int
) -> None:
    """Peaks of activations and gradients were added, which gpipe never has together: 12 % too high with 4 microbatches.

    Where an embedding is large, the gradient that a backward adds to was counted as if the backward made it: up to 43 %
    too high. And what I leaves for W was taken as gone while I runs: 1 % too low.
    """
    options = {"layers": 4, "width": 64, "heads": 4, "vocabulary": vocabulary}
    config = config_for("gpt", batch=2 * microbatches, sequence=16, options=options)
    pipeline = replace(config.pipeline, ranks=2, stages=stages, schedule=schedule, microbatches=microbatches)
    config = replace(config, pipeline=pipeline)
    cluster = Cluster(hosts=1, devices=2)
    found = candidate_of(config, profile_config(config, cluster.software), cluster)
    counts = list(found.pricing.profile.counts_of(found.cuts))
    real = measure_peaks(config, found.schedule(), counts, open_data(config).first(), lambda _, tensor: tensor.zero_())
    assert real is not None
    for planned, (_, together), measured in zip(found.memory, found.peaks, real, strict=True):
        there = planned.weights + planned.optimizer
        assert planned.tensors == there + together
        assert 0.998 <= planned.tensors / (there + measured.with_gradients) <= 1.08


def test_what_a_family_holds_does_not_depend_on_which_was_asked_first() -> None:
    """Whole and split backwards need other bytes for a moment, and shared the figure of whichever was priced first."""
    config = config_for("gpt", batch=8, sequence=64, options={"layers": 4, "width": 64, "heads": 4})
    cluster = Cluster(hosts=1, devices=2)
    profile = profile_config(config, cluster.software)

    def memory(*names: str) -> dict[str, object]:
        pricing = Pricing(profile, cluster, MeshLayout(2), 1)
        cuts = pricing.cut(2)
        assert cuts is not None
        return {name: PlanCandidate(pricing, name, 1, 4, False, cuts, 2.0).memory for name in names}

    assert memory("1f1b", "zb-h1") == memory("zb-h1", "1f1b")
