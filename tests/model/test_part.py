"""What the runtime knows of a stage: names in the whole model, and where state hangs in a tree of modules."""

from __future__ import annotations

import torch
from torch import nn

from penstock.model.part import Names, hang, state_names


def test_names_of_what_came_later_follow_from_the_prefix_or_from_the_part_that_they_are_in() -> None:
    names = Names({"weight": "head.weight"}, "head.", {"inner": "body.3"})
    assert names["weight"] == names.get("weight", "ignored") == "head.weight"
    assert names["mask"] == "head.mask"
    assert names["inner.mask"] == "body.3.mask"
    assert names["inner"] == "body.3"


def test_a_tensor_is_hung_under_its_dotted_name_as_the_object_that_it_is() -> None:
    root, weight, mask = nn.Module(), nn.Parameter(torch.ones(2)), torch.zeros(2)
    hang(root, "blocks.0.weight", weight)
    hang(root, "blocks.0.mask", mask, persistent=False)
    assert dict(root.named_parameters())["blocks.0.weight"] is weight
    assert dict(root.named_buffers())["blocks.0.mask"] is mask
    assert list(root.state_dict()) == ["blocks.0.weight"]


def test_every_name_counts_also_of_buffers_that_are_not_there_yet_and_of_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model[0].register_buffer("later", None)
    assert state_names(model) == ["0.weight", "1.weight", "0.later"]
