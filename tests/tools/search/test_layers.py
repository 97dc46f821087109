"""Layers become stages: costs, placement, topology and what is left of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import UsageError
from penstock.schedule import Costs, Hosts, Layer, search, search_report, simulate
from penstock.tools.search.cutting import cut_layers, split_output
from penstock.tools.search.layers import Model, Shape, layers_of
from penstock.tools.search.rows import hosts_of, rows_to_try


def model(*layers: Layer | float, speeds: tuple[float, ...] = (1.0, 1.0), **more: object) -> Model:
    return Model(layers_of(layers), speeds, more.pop("base", Costs()), **more)  # type: ignore[arg-type]


def test_a_stage_costs_what_its_layers_cost_on_its_rank() -> None:
    shape = Shape(model(1, 2, Layer(3, 4, 5, activation=7), speeds=(1.0, 0.5)), (0, 1), (2, 1), "loop")
    costs = shape.costs()
    assert costs.forward == (3, 6)
    assert costs.input == (3, 8)
    assert costs.weight == (3, 10)
    assert costs.activation == (2, 7)


def test_state_is_taken_off_the_memory_of_its_rank() -> None:
    layers = (Layer(state=1.0), Layer(state=2.0), Layer(state=4.0))
    assert Shape(model(*layers), (0, 1), (2, 1), "loop").caps([10, 10]) == [7, 6]
    assert Shape(model(*layers), (0, 1), (1, 1), "loop", (0.25, 0.75)).caps([10, 10]) == [8, 5]


def test_skips_are_edges_of_the_stages_that_they_connect() -> None:
    shape = Shape(model(1, 1, 1, 1, skips=((0, 3), (0, 1))), (0, 1, 0), (2, 1, 1), "loop")
    assert shape.topology.edges == ((0, 1), (0, 2), (1, 2))


def test_bytes_of_a_skip_add_to_those_of_the_chain() -> None:
    base = Costs(links=[[0, 1], [1, 0]])
    layers = [Layer(bytes=size) for size in (1.0, 10.0, 100.0, 1000.0)]
    shape = Shape(model(*layers, base=base, skips=((0, 2), (0, 3))), (0, 1, 0), (2, 1, 1), "loop")
    sizes = shape.costs().bytes
    assert dict(sizes) == {(0, 1): 11.0, (0, 2): 1.0, (1, 2): 100.0}  # type: ignore[call-overload]


def test_a_split_output_layer_is_a_stage_on_each_rank_and_one_that_joins_them() -> None:
    shape = Shape(model(1, 1, 4), (0, 1), (1, 1), "loop", (0.5, 0.5))
    assert str(shape.placement) == "0 1 0 1 1"
    assert shape.topology.edges == ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4))
    assert shape.costs().forward == (1, 1, 2, 2, 0)


def test_the_output_layer_goes_where_there_is_time() -> None:
    shares = split_output(model(1, 4.0 / 3), [6.0, 3.0])
    assert shares == pytest.approx((1 / 8, 7 / 8))  # loads of 6.5 both
    assert split_output(model(1, 1), [9.0, 3.0]) == (0.0, 1.0)
    assert split_output(model(1, 1, speeds=(1.0, 0.5)), [3.0, 3.0]) == pytest.approx((2 / 3, 1 / 3))


def test_a_slow_rank_gets_less_and_a_stage_without_layers_is_left_out() -> None:
    shape = cut_layers(model(*[1] * 6, speeds=(1.0, 0.5)), (0, 1), 8, "loop")
    assert shape is not None
    assert shape.counts == (4, 2)
    small = cut_layers(model(1, 1, 1), (0, 1, 0, 1), 8, "loop")
    assert small is not None
    assert len(small.counts) == 3
    assert sum(small.counts) == 3


def test_a_cut_must_fit_into_the_memory_of_each_rank() -> None:
    """Once a fast rank was given 8 of 10 layers, though it holds 6, and the search said that no cut fits."""
    fast = model(*[1] * 10, speeds=(0.25, 1.0), memory=(6.0, 6.0))
    shape = cut_layers(fast, (0, 1), 8, "loop")
    assert shape is not None
    assert shape.counts == (4, 6)
    uneven = cut_layers(replace(fast, memory=(9.0, 3.0)), (0, 1), 8, "loop")
    assert uneven is not None
    assert uneven.counts == (7, 3)
    found = search_report(2, 6, layers=[1] * 10, speeds=[0.25, 1], memory=[9, 3], effort=30)
    assert all(held <= cap for held, cap in zip(found.timeline.peak_memory, (9, 3), strict=True))


def test_hosts_are_found_in_links() -> None:
    links = Hosts((2, 2), inside=0.1, between=1.0).matrix()
    assert hosts_of(links) == [[0, 1], [2, 3]]
    rows = {row for _, row in rows_to_try(model(1, speeds=(1.0,) * 4, base=Costs(links=links)), (2,), ("v",))}
    assert (0, 1, 1, 0, 2, 3, 3, 2) in rows
    assert (0, 1, 2, 3, 3, 2, 1, 0) in rows


def test_ranks_that_are_near_come_together_whatever_their_numbers() -> None:
    host = (0, 1, 0, 1)
    links = [[0.1 if a == b else 5.0 for b in host] for a in host]
    rows = {row for _, row in rows_to_try(model(1, speeds=(1.0,) * 4, base=Costs(links=links)), (1,), ("loop",))}
    assert rows & {(0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3), (2, 0, 3, 1)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": []}, "no layers"),
        ({"layers": 3}, "list of Layer"),
        ({"layers": [1]}, "cannot be cut for 2 ranks"),
        ({"layers": [1, 1], "speeds": [1]}, "speeds has 1 numbers for 2 ranks"),
        ({"layers": [1, 1], "speeds": [1, 0]}, "number above 0"),
        ({"layers": [1, 1], "skips": [(1, 0)]}, "to a later layer"),
        ({"layers": [1, 1], "links": [[0]]}, "links are of 1 ranks"),
        ({"layers": [1], "vocabulary": True}, "only one layer"),
        ({"layers": [1, 1], "objective": "span"}, "makespan"),
        ({"layers": [1, 1], "memory": 0.5}, "memory is too little"),
        ({"speeds": [1, 2]}, "give layers="),
        ({"links": [[0, 1], [1]]}, "a square"),
        ({"links": 5}, "links is a list of rows"),
        ({"links": Hosts((4, 4))}, "links are of 8 ranks, and there are 2"),
        ({"layers": [1, 1], "speeds": 3}, "speeds is a list of one number per rank"),
        ({"layers": [1, 1], "skips": 3}, "skips is a list of pairs"),
        ({"layers": [1, 1], "skips": [3]}, "to a later layer"),
        ({"layers": [1, 1], "vocabulary": "yes"}, "vocabulary is True or False"),
        ({"layers": [1, 1], "costs": Costs(forward=2.0, held=1.0)}, "got forward, held as well"),
        ({"seed": "x"}, "seed is a whole number"),
        ({"progress": 3}, "progress is a function"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        search(2, 4, seconds=0, **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="number of 0 or more"):
        Layer(-1)
    with pytest.raises(UsageError, match="number of ranks on each host"):
        Hosts(5)  # type: ignore[arg-type]


def test_links_without_layers_are_costs_of_the_links() -> None:
    found = search_report(2, 4, stages_per_rank=1, links=[[0, 1.5], [0.5, 0]], seconds=0)
    assert found.costs.links == ((0, 1.5), (0.5, 0))
    assert simulate(found.schedule, found.costs).makespan == found.value
