"""Tokenizers of a few words, and the chats that they know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.tools.train.data.tokenizer import Tokenizer

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}" + PROMPT
)


CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Well"},
]


def fast() -> Any:
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = Fast(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["Hello Good day Bye Well: "] * 3,
        trainers.BpeTrainer(
            vocab_size=290,
            special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made


def saved(folder: Path, template: str | None) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=fast(), eos_token="<|end|>")
    made.chat_template = template
    made.save_pretrained(folder)
    return Tokenizer(str(folder))
