"""Text from a model of transformers: rows of several lengths with a cache, each as if it were alone."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from penstock.errors import UsageError
from penstock.tools.train.generation.sampling import Sampling, continue_together

PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 1, 4]]


def models() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=16, **shape))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    return [llama.double().eval(), gpt2.double().eval()]


def written(model: torch.nn.Module, prompts: list[list[int]], end: int | None = None) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for row, token in continue_together(model, end, prompts, 6, Sampling(temperature=0)):
        found[row].append(token)
    return found


@pytest.mark.parametrize("number", [0, 1], ids=["llama", "gpt2"])
def test_rows_that_are_written_together_are_those_of_a_plain_loop(number: int) -> None:
    model = models()[number]
    together = written(model, PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert together[row] == tokens[len(prompt) :]


def test_a_row_ends_with_its_end_and_others_go_on() -> None:
    model = models()[0]
    plain = written(model, PROMPTS)
    end = plain[0][2]
    ended = written(model, PROMPTS, end)
    for row, tokens in plain.items():
        wanted = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert ended[row] == wanted


def test_a_text_beyond_a_table_of_positions_is_refused_with_the_room_that_is_left() -> None:
    model, greedy = models()[1], Sampling(temperature=0)
    assert len(list(continue_together(model, None, [[1] * 10], 7, greedy))) == 7
    with pytest.raises(UsageError, match=r"10 tokens and 8 more go beyond the 16 positions .*; --tokens 7 is the most"):
        list(continue_together(model, None, [[1] * 10], 8, greedy))
    with pytest.raises(UsageError, match=r"17 tokens and 1 more go beyond .*; give a shorter one"):
        list(continue_together(model, None, [[1] * 17], 1, greedy))


def test_a_text_beyond_positions_that_are_computed_is_written_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As training does, which could make a model longer than `generate` would let it write."""
    model, greedy = models()[0], Sampling(temperature=0)
    assert len(list(continue_together(model, None, [[1] * 10], 7, greedy))) == 7
    assert not caplog.messages
    assert len(list(continue_together(model, None, [[1] * 10], 8, greedy))) == 8
    (words,) = caplog.messages
    assert "8 more go beyond the 16 positions that the model was made for" in words
    assert words.endswith("--tokens 7 is the most")
