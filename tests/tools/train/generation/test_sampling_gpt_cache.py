"""The built-in GPT, token by token with a cache, is the built-in GPT."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from penstock.tools.train.config.settings import GPTOptions
from penstock.tools.train.generation.sampling import CachedGPT, Sampling
from penstock.tools.train.models.gpt import build_gpt

CONTEXT = 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = build_gpt(GPTOptions(layers=3, width=16, heads=4, vocabulary=20, context=CONTEXT), CONTEXT).double().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)  # biases and norms that are not as they begin
    return made


def test_scores_are_those_of_the_model_whether_read_at_once_or_one_by_one() -> None:
    made = model()
    tokens = [3, 17, 0, 5, 5, 12]
    with torch.no_grad():
        wanted = made(torch.tensor([tokens]))[0].numpy()
    np.testing.assert_allclose(CachedGPT(made).read(tokens), wanted[-1], rtol=1e-11)
    slowly = CachedGPT(made)
    for token, row in zip(tokens, wanted, strict=True):
        np.testing.assert_allclose(slowly.read([token]), row, rtol=1e-11)
    halves = CachedGPT(made)
    halves.read(tokens[:2])
    np.testing.assert_allclose(halves.read(tokens[2:]), wanted[-1], rtol=1e-11)


def test_a_row_beyond_the_context_goes_on_from_its_last_half() -> None:
    made, kept = model(), [1, 2, 3]
    found = list(CachedGPT(made).continue_tokens(kept, 20, Sampling(temperature=0)))
    for token in found:
        with torch.no_grad():
            assert int(made(torch.tensor([kept]))[0, -1].argmax()) == token
        kept = [*kept, token]
        kept = kept[-CONTEXT // 2 :] if len(kept) > CONTEXT else kept
    assert len(found) == 20


def test_tokens_end_with_the_end_and_depend_on_the_seed() -> None:
    gpt = CachedGPT(model())
    drawn = [list(gpt.continue_tokens([1], 30, Sampling(temperature=3.0, seed=seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    end = drawn[0][10]
    ended = list(gpt.continue_tokens([1], 30, Sampling(temperature=3.0, seed=1), end))
    assert ended == drawn[0][: drawn[0].index(end) + 1]
