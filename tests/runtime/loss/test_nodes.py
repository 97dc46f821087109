"""What single nodes of a loss's graph show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.runtime.loss.nodes import is_along_rows, makes_number, mean_of_columns, slope_of, takes_row

ROWS, WIDTH = 4, 6


def output() -> Tensor:
    return torch.rand(ROWS, WIDTH, requires_grad=True) * 1


SLOPES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "an absolute value": (lambda number: (number - 5).abs(), -1.0),
    "at most": (lambda number: number.clamp(max=2), 0.0),
    "a square": (lambda number: number**2, 6.0),
    "between two": (lambda number: torch.lerp(number.new_zeros(()), number, torch.tensor(0.25)), 0.25),
    "the larger": (lambda number: torch.maximum(number.detach() - 1, number), 1.0),
}


@pytest.mark.parametrize("name", SLOPES)
def test_a_function_of_numbers_has_a_slope_and_reading_it_leaves_the_graph(name: str) -> None:
    function, slope = SLOPES[name]
    leaf = torch.tensor(3.0, requires_grad=True)
    number = function(leaf * 1)
    node = number.grad_fn
    assert makes_number(node)
    (place,) = (place for place, (below, _) in enumerate(node.next_functions) if below is not None)  # type: ignore[union-attr]
    assert float(slope_of(place, node)) == slope
    number.backward()
    assert leaf.grad == slope


def test_what_makes_a_number_of_many_is_no_function_of_a_number() -> None:
    assert not any(makes_number(each.grad_fn) for each in (output().norm(), output()[:1, :1].sum(), output()[0, 0]))


def test_a_sum_is_along_rows_where_it_is_along_the_first_dimension() -> None:
    o = output()
    along = [o.sum(), o.mean(), o.sum(0), o.mean((0, 1)), o.mean(-2)]
    assert all(is_along_rows(each.grad_fn) for each in along)
    assert not any(is_along_rows(each.grad_fn) for each in (o.sum(1), o.mean(-1)))


def test_what_is_taken_out_along_the_first_dimension_is_of_one_row() -> None:
    o = output()
    for row in (o[1], o.unbind()[1].square(), (2 * o)[1, :3].sum()):
        assert takes_row(row.grad_fn, {o.grad_fn})
    for several in (o[:, 1], o[1] + o[2], o[:2].sum(), o.square()):
        assert not takes_row(several.grad_fn, {o.grad_fn})


def test_means_of_columns_differ_where_any_column_does() -> None:
    def mean(*columns: float) -> float:
        return float(mean_of_columns(lambda _: torch.tensor(columns), None))

    assert mean(2.0, 2.0, 2.0) == pytest.approx(2.0)
    assert mean(4.0, 2.0, 6.0) == pytest.approx(2 * mean(2.0, 1.0, 3.0))
    assert len({mean(1.0, 2.0, 3.0), mean(2.0, 1.0, 3.0), mean(3.0, 2.0, 1.0)}) == 3
