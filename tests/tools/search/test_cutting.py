"""Cuts of layers into stages: each stage of a fixed number has a layer, however uneven the layers are."""

from __future__ import annotations

import random

import pytest

from penstock.schedule import FoundCut, search_report
from penstock.schedule.timing.costs import Costs
from penstock.tools.search.cut_search import search_stages
from penstock.tools.search.cutting import cut_layers
from penstock.tools.search.layers import Layer, Model


def drawn(seed: int, count: int) -> list[Layer]:
    """Layers of which some take thousands of times as long as others, as measured ones do on a busy machine."""
    generator = random.Random(seed)
    times = [generator.choice((0.01, 0.1, 1.0, 10.0, 50.0)) * generator.random() / 3 for _ in range(count)]
    return [Layer(time, time, time, activation=100.0) for time in times]


@pytest.mark.parametrize("seed", range(6))
def test_so_many_stages_as_asked_for_are_found_for_any_layers(seed: int) -> None:
    """Whichever way a row was cut by times alone, a stage without a layer was left out, and no cut remained."""
    found = search_stages(5, 2, 4, drawn(seed, 12), None, effort=1)
    assert len(found.counts) == 5
    assert min(found.counts) >= 1
    assert sum(found.counts) == 12


def test_without_a_fixed_number_a_stage_that_gets_no_layer_is_left_out() -> None:
    """One layer takes nearly all of the time: the stages around it would be empty."""
    layers = [Layer(time, time, time) for time in (0.01, 9.0, 0.01)]
    model = Model(tuple(layers), (1.0, 1.0), Costs())
    row = (0, 1, 0, 1, 0)
    shape = cut_layers(model, row, 4.0, "loop")
    assert shape is not None
    assert len(shape.counts) < len(row)


@pytest.mark.parametrize("times", [[1, 1, 1, 20], [20, 1, 1, 1], [0, 5, 0, 0, 0], [1, 0, 0, 0, 0, 9], [0, 0, 0, 0]])
def test_a_layer_that_outweighs_all_others_leaves_every_rank_a_layer(times: list[float]) -> None:
    """In proportion to times alone, the ranks next to such a layer got none, and the model was refused as too short."""
    found = search_report(3, 4, layers=times, stages_per_rank=1, seconds=0)
    assert isinstance(found, FoundCut)
    assert len(found.counts) == 3
    assert min(found.counts) >= 1
    assert 4 * 3 * max(times) <= found.lower_bound <= found.value  # one rank has that layer, four times
