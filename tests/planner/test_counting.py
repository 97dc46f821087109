"""What is counted on tensors without memory, held against formulas and against tensors with memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from penstock.planner.cluster import Software
from penstock.planner.fake_model import profile_config, profile_module
from penstock.planner.plan import config_for
from penstock.planner.profile import Profile, profile_model
from penstock.train.config.settings import GPTOptions
from penstock.train.loss import TokenLoss
from penstock.train.models.gpt import build_gpt

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


def test_tensor_parallelism_divides_what_its_layers_make_until_they_are_summed() -> None:
    profile = gpt(2, 64, 4, 500, 32, Software())
    block = next(unit for unit in profile.one if unit.name == "block0")
    assert block.forward.flops.common == 0  # all of its products are divided
    assert block.parameters.common == 4 * 64 + 64 + 64  # the norms, and the biases after a sum
    activation = 32 * 64 * 4
    assert block.forward.summed == block.backward.summed == 2 * activation  # Megatron's f and g, twice per layer
    assert block.saved.at(2) < block.saved.at(1)
    assert block.saved.at(2) > block.saved.at(1) / 2


def counted_flops(model: nn.Module, example: Tensor) -> float:
    """Forward and backward of one row, as a plan counts them."""
    profile = profile_module(model, (example,), config_for("gpt", sequence=1), Software())
    return sum(unit.forward.flops.at(1) + unit.backward.flops.at(1) for unit in profile.one)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv1d(3, 8, 3, bias=False), nn.Conv1d(8, 8, 3, stride=2)), (3, 16)),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 10)), (3, 8, 8)),
        (nn.Sequential(nn.ConvTranspose2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 3)), (3, 8, 8)),
    ],
    ids=["1d", "2d", "transposed"],
)
def test_convolutions_count_what_torch_counts(model: nn.Module, shape: tuple[int, ...]) -> None:
    """The gradients of a convolution are three outputs, of which the first is None where the input needs none.

    They were given to torch's formula without the Nones: every model with a convolution ended in an IndexError.
    """
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.zeros(1, *shape)).sum().backward()
    assert counted_flops(model, torch.zeros(1, *shape)) == counter.get_total_flops() > 0


def test_a_grouped_convolution_has_gradients_as_dear_as_its_forward() -> None:
    """Torch's own formula counts the gradient of the weights as if every channel met every other."""
    model = nn.Sequential(nn.Conv2d(8, 8, 1, groups=8), nn.Conv2d(8, 8, 3, padding=1, groups=4))
    forward = [2 * 64 * 8, 2 * 64 * 8 * 2 * 9]
    assert counted_flops(model, torch.zeros(1, 8, 8, 8)) == 2 * forward[0] + 3 * forward[1]


def test_a_model_without_a_list_of_layers_is_refused_by_name() -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 4)
    with pytest.raises(Exception, match=r"Linear has no nn\.Sequential"):
        profile_model(model, lambda rows: F.relu(model(torch.zeros(rows, 4))).sum())
