"""A model as a chain of units whose figures were counted, held against formulas and against autograd."""

from __future__ import annotations

import pytest
import torch
from planner_cases import counted_flops
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.planner.cluster import Software
from penstock.planner.fake_model import profile_config, profile_module
from penstock.planner.plan import config_for
from penstock.planner.profile import Profile, profile_model
from penstock.tools.train.config.settings import GPTOptions
from penstock.tools.train.loss import TokenLoss
from penstock.tools.train.models.gpt import build_gpt

MEGATRON = Software(name="megatron", fused_attention=False)


def gpt(
    layers: int, width: int, heads: int, vocabulary: int, sequence: int, software: Software, **keys: str
) -> Profile:
    options = {"layers": layers, "width": width, "heads": heads, "vocabulary": vocabulary}
    return profile_config(config_for("gpt", sequence=sequence, options=options, **keys), software)


@pytest.mark.parametrize(("layers", "width", "vocabulary", "sequence"), [(2, 64, 500, 32), (9, 128, 1000, 64)])
def test_products_are_those_of_the_published_formula(layers: int, width: int, vocabulary: int, sequence: int) -> None:
    profile = gpt(layers, width, 4, vocabulary, sequence, MEGATRON)
    counted = sum(unit.forward.flops.at(1) + unit.backward.flops.at(1) for unit in profile.one)
    shape = 1 + sequence / (6 * width) + vocabulary / (12 * layers * width)
    formula = 72 * sequence * layers * width**2 * shape  # of arXiv 2104.04473, without recomputing
    assert counted == pytest.approx(formula, rel=1e-12)
    assert profile.model_flops == counted


def test_causal_attention_as_one_kernel_needs_half_of_its_products_and_mfu_counts_them_all() -> None:
    whole, fused = (gpt(2, 64, 4, 500, 32, Software(fused_attention=fused)) for fused in (False, True))
    attention = 4 * 2 * 32 * 32 * 64  # two products of 32 x 32 x 64, in two layers
    forward = [sum(unit.forward.flops.at(1) for unit in each.one) for each in (whole, fused)]
    assert forward[0] - forward[1] == attention / 2
    assert fused.model_flops == whole.model_flops


@pytest.mark.slow
def test_layers_that_are_not_built_count_like_those_that_are() -> None:
    """Four of equal layers are built; the profile of nine must be what building all nine would give."""
    options = GPTOptions(layers=9, width=64, heads=4, vocabulary=500)
    loss = TokenLoss()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_gpt(options, 32)

        def train(rows: int) -> Tensor:
            ids = torch.zeros(rows, 32, dtype=torch.int64)
            target = torch.zeros_like(ids)
            return loss(model(ids), target)

        built = profile_model(model, train, sequence=32)
    short = gpt(9, 64, 4, 500, 32, Software())
    assert [unit.name for unit in short.one] == [unit.name for unit in built.one]
    for one, other in zip(short.one, built.one, strict=True):
        assert one.saved.at(1) == other.saved.at(1)
        assert one.forward.traffic.at(1) == other.forward.traffic.at(1)
        assert one.parameters.at(1) == other.parameters.at(1)


def test_tensor_parallelism_divides_what_its_layers_make_until_they_are_summed() -> None:
    profile = gpt(2, 64, 4, 500, 32, Software())
    block = next(unit for unit in profile.one if unit.name == "block0")
    assert block.forward.flops.common == 0  # all of its products are divided
    assert block.parameters.common == 4 * 64 + 64 + 64  # the norms, and the biases after a sum
    activation = 32 * 64 * 4
    assert block.forward.summed == block.backward.summed == 2 * activation  # Megatron's f and g, twice per layer
    assert block.saved.at(2) < block.saved.at(1)
    assert block.saved.at(2) > block.saved.at(1) / 2


def test_a_model_without_a_list_of_layers_is_one_piece() -> None:
    """It cannot be cut, and so it was refused; but replicas and a single device need no cut."""
    model = nn.Linear(4, 4)
    profile = profile_module(model, (torch.zeros(1, 4),), config_for("gpt", sequence=1), Software())
    assert profile.counts_of(()) == (1,)
    assert profile.parameters == 4 * 4 + 4
    assert counted_flops(model, torch.zeros(1, 4)) == 2 * 2 * 4 * 4  # the input needs no gradient


def test_a_model_that_takes_no_single_row_is_counted_on_more() -> None:
    """A batch norm without other positions than rows refuses one row while it trains."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    one, other = (counted_flops(each, torch.zeros(2, 8)) for each in (model, plain))
    assert one == other == 2 * 2 * 8 * 8
    profile = profile_module(model, (torch.zeros(2, 8),), config_for("gpt", sequence=1), Software())
    assert [unit.output for unit in profile.units(5)] == [5 * 32, 5 * 32, 5 * 32, 0]
    assert [unit.parameters.at(1) for unit in profile.units(5)] == [0, 72, 16, 0]


def test_bytes_kept_for_the_backward_are_those_that_autograd_saves() -> None:
    """Run for real, with a hook on everything that is saved; what is saved twice counts once."""
    options = GPTOptions(layers=3, width=64, heads=4, vocabulary=500)
    model, ids = build_gpt(options, 32), torch.zeros(2, 32, dtype=torch.int64)
    held: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in model.parameters()} | {ids.untyped_storage().data_ptr()}
    kept: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        loss = TokenLoss()(model(ids), ids)
    counted = sum(unit.saved.at(1) for unit in gpt(3, 64, 4, 500, 32, Software()).units(2))
    assert counted == pytest.approx(sum(held.values()), rel=0.02)  # the output and the loss are alive as well
    assert loss is not None
