"""Model FLOPs per token, and the peak that they are compared with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.pipeline import Pipeline
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import GPTOptions
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.models.gpt import build_gpt
from penstock.tools.train.run.flops import flops_per_token, peak_flops, utilisation

WIDTH, LAYERS, SEQUENCE = 16, 3, 8
MATRICES = LAYERS * (3 * WIDTH + WIDTH + 4 * WIDTH + 4 * WIDTH) * WIDTH + 256 * WIDTH  # blocks and the head
ATTENTION = 12 * LAYERS * WIDTH * SEQUENCE


def made() -> nn.Sequential:
    return build_gpt(GPTOptions(layers=LAYERS, width=WIDTH, heads=2), SEQUENCE)


def test_the_formula_counts_what_multiplies() -> None:
    model = made()
    assert flops_per_token(model, SEQUENCE) == 6 * MATRICES + ATTENTION
    model.block0.requires_grad_(False)  # type: ignore[union-attr]
    assert flops_per_token(model, SEQUENCE) == 6 * MATRICES - 2 * 12 * WIDTH**2 + ATTENTION


def test_it_is_what_torch_counts() -> None:
    """Of one forward and backward, with an attention whose products torch's counter sees."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, ids = made(), torch.zeros(1, SEQUENCE, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() == SEQUENCE * flops_per_token(model, SEQUENCE)


class Experts(nn.Module):
    """A layer of experts as transformers names them, of which a token visits some."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(8, 4, 6))
        self.norm = nn.LayerNorm(4)
        self.config = type("Shape", (), {"num_local_experts": 8, "num_experts_per_tok": 2})()


def test_of_experts_a_token_visits_some() -> None:
    assert flops_per_token(Experts(), 5) == 6 * (8 * 4 * 6) / 4


def test_a_tied_embedding_is_looked_up_and_multiplied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    assert flops_per_token(model, 5) == 6 * 40
    model["head"].weight = model["embed"].weight
    assert flops_per_token(model, 5) == 6 * 40


def test_the_peak_is_given_or_measured() -> None:
    assert peak_flops(load_config(None, ["logging.peak_flops=2e12"])) == (2e12, "logging.peak_flops")
    found = peak_flops(load_config(None, []))
    assert found is not None
    assert found[0] > 1e6
    assert found[1] == "measured"
    config = load_config(None, ["logging.peak_flops=1e12"])
    ids, rows = torch.zeros(2, SEQUENCE, dtype=torch.int64), torch.zeros(2, SEQUENCE)
    with Pipeline(made(), stages=2, microbatches=1) as pipe:
        share, words = utilisation(config, pipe, DataBatch((ids,), {}, None, 16))
        assert share == pytest.approx((6 * MATRICES + ATTENTION) / 1e12)
        assert words == "1 TFLOP/s, logging.peak_flops"
        assert utilisation(config, pipe, DataBatch((rows,), {}, None, 2))[0] is None
