"""Real models, tiny and with random weights, cut at 2 and 4 stages: losses and gradients of one process.

The issue's list runs by default; the long list is marked slow. Bitwise where no parameter is on several stages and
the first gradient of a sum is the same; else a few roundings, because sums are taken in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model.zoo import CAUSAL, DIFFUSERS, IMAGES, MASKED, SEQUENCES, SOUNDS, TWO_TOWERS, S, compared, make
from tiers import mostly_slow, slow_if

import penstock
from penstock.errors import PeerFailure

LISTED = ("Llama", "Qwen2", "Qwen3", "Mistral", "GPT2", "Bert", "T5", "ViT", "Mixtral", "UNet2DModel")
EVERY = (*CAUSAL, *MASKED, *SEQUENCES, *IMAGES, *SOUNDS, *TWO_TOWERS, *DIFFUSERS)
BITWISE = {"Llama", "Qwen2", "Qwen3", "Mistral", "ViT", "Mixtral"}  # nothing tied, every sum in one order
ROUNDINGS = 2e-5
CUTS = [(2, "1f1b"), (2, "zb-h1"), (4, "1f1b"), (4, "zb-v")]
FAST = [
    ("Llama", 2, "1f1b"),
    ("GPT2", 4, "1f1b"),
    ("T5", 4, "1f1b"),
    ("ViT", 4, "zb-v"),
]


@pytest.fixture(autouse=True)
def _their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check(family: str, stages: int, schedule: str, **options: Any) -> None:
    model, batch = make(family)
    far = compared(model, [batch(S), batch(S + 3)], stages=stages, schedule=schedule, **options)
    assert far == 0.0 if family in BITWISE else far < ROUNDINGS


@pytest.mark.parametrize(
    ("family", "stages", "schedule"),
    [  # each with 2 and with 4 stages, the schedules by turns; a few in the fast tests
        pytest.param(family, *cut, marks=[] if (family, *cut) in FAST else slow_if(column % 2 == row % 2))
        for row, family in enumerate(LISTED)
        for column, cut in enumerate(CUTS)
    ],
)
def test_the_listed_families_train_as_in_one_process(family: str, stages: int, schedule: str) -> None:
    check(family, stages, schedule)


@pytest.mark.parametrize(
    ("family", "stages", "schedule"),
    [  # by turns
        pytest.param(family, *cut, marks=slow_if((row + 8 * column) % 16 == 0))
        for row, family in enumerate(sorted(set(EVERY) - set(LISTED)))
        for column, cut in enumerate(CUTS[1::2])
    ],
)
def test_many_more_families_train_as_in_one_process(family: str, stages: int, schedule: str) -> None:
    check(family, stages, schedule)


@pytest.mark.parametrize("family", mostly_slow(["Llama", "T5", "UNet2DModel"], "T5"))
def test_a_real_model_is_recomputed_as_in_one_process(family: str) -> None:
    check(family, 2, "1f1b", recompute="always")


@pytest.mark.parametrize("family", mostly_slow(["Llama", "Bert"], "Llama"))
def test_a_hugging_face_model_with_gradient_checkpointing_trains_as_without(family: str) -> None:
    model, batch = make(family)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert compared(model, [batch(S), batch(S + 3)], stages=2, schedule="1f1b") < ROUNDINGS


def test_a_tied_head_is_exact_to_rounding_in_double() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model, batch = make("GPT2")
        loss = lambda output, _=None: output.logits.square().mean()  # noqa: E731  (the model's own is in float32)
        assert compared(model, [batch(S), batch(S)], loss=loss, stages=4, schedule="zb-v") < 1e-12
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
def test_a_router_loss_switched_on_in_the_configuration_trains() -> None:
    """Transformers collects the logits by hooks inside of the layers; that is one more output of them."""
    model, batch = make("Mixtral")
    model.config.output_router_logits = True  # type: ignore[union-attr]
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    assert compared(model, [batch(S), batch(S + 3)], stages=2) < ROUNDINGS
    again = sum(len(module._forward_hooks) for module in model.modules())
    model.zero_grad()
    assert compared(model, [batch(S)], stages=4) < ROUNDINGS
    assert sum(len(module._forward_hooks) for module in model.modules()) == again > hooks  # installed once


def test_a_cache_that_is_only_among_further_arguments_is_switched_off() -> None:
    model, batch = make("GraniteMoe")
    assert compared(model, [batch(S), batch(S + 3)], stages=4, schedule="zb-v") < ROUNDINGS


def test_layer_drop_raises_and_never_trains_by_the_old_plan() -> None:
    model, batch = make("Wav2Vec2")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.layerdrop = 0.5
    example = {name: value[:2] for name, value in batch(S).items()}
    with penstock.Pipeline(
        model,
        stages=2,
        microbatches=2,
        example=example,
        cut_options=penstock.CutOptions(method="replay"),
        loss_options=penstock.LossOptions(reduction="sum"),
    ) as pipe:

        def train() -> None:
            for _ in range(8):
                pipe.step(**batch(S))

        with pytest.raises(PeerFailure, match="the model took another path than with the example"):
            train()
