"""Train a tokenizer on Python's standard library, for examples/train/gpt_tokenizer.toml.

    python examples/train/make_tokenizer.py                  writes runs/tokenizer/tokenizer.json
    penstock train examples/train/gpt_tokenizer.toml

Files of your own do as well: give them to `train` below, and to `data.source`.
"""

import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tokenizer")
folder.mkdir(parents=True, exist_ok=True)
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))

tokens = Tokenizer(models.BPE())
tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokens.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=2000,
    special_tokens=["<|end|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte is a token, so that any text has some
    show_progress=False,
)
tokens.train([str(path) for path in files], trainer)
tokens.save(str(folder / "tokenizer.json"))
print(f"{tokens.get_vocab_size()} tokens from {len(files)} files in {folder / 'tokenizer.json'}")
