"""Make what examples/train/chats.toml trains on: a folder with a small Llama, its tokenizer, and a file of chats.

    python examples/train/make_chats.py            writes runs/chats
    penstock train examples/train/chats.toml

Nothing is downloaded. For a model of your own, name its folder in the configuration: any folder that `save_pretrained`
of transformers has written, with a tokenizer that has a chat template.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/chats")
folder.mkdir(parents=True, exist_ok=True)

# Chats of one to three questions about sums: something that a small model can learn in a minute.
draw = random.Random(0)
chats = []
for _ in range(400):
    messages = []
    for _ in range(draw.randint(1, 3)):
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        messages.append({"role": "user", "content": f"What is {a} plus {b}?"})
        messages.append({"role": "assistant", "content": f"{a} plus {b} is {a + b}."})
    chats.append({"messages": messages})
(folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))

# A tokenizer that is trained on them, with a template that says how a chat is written.
tokens = Tokenizer(models.BPE())
tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokens.decoder = decoders.ByteLevel()
special = ["<|end|>", "<|user|>", "<|assistant|>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
tokens.train_from_iterator((each["content"] for chat in chats for each in chat["messages"]), trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|end|>", pad_token="<|end|>")
tokenizer.chat_template = (
    "{% for each in messages %}<|{{ each.role }}|>{{ each.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
tokenizer.save_pretrained(folder / "model")

torch.manual_seed(0)
shape = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=128,
)
LlamaForCausalLM(shape).save_pretrained(folder / "model")
print(f"{len(chats)} chats and a model of {len(tokenizer)} tokens in {folder}")
