"""The leaves of a graph of autograd's, counted and listed."""

from __future__ import annotations

import torch

from penstock.runtime.backward.graph_leaves import leaves_in_graph, uses_in_graph


def test_every_use_of_a_leaf_counts_and_shared_nodes_are_walked_once() -> None:
    weight, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    middle = weight * other
    uses = uses_in_graph([middle + weight, middle.sum()])
    assert uses[id(weight)] == 2
    assert uses[id(other)] == 1


def test_a_leaf_that_is_an_output_itself_is_a_use() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert uses_in_graph([weight, weight * 2])[id(weight)] == 2


def test_what_is_behind_a_known_tensor_is_left_out() -> None:
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    known = first * 2
    output = known * second
    assert {id(leaf) for leaf in leaves_in_graph([output.grad_fn])} == {id(first), id(second)}
    assert {id(leaf) for leaf in leaves_in_graph([output.grad_fn], [known])} == {id(second)}
