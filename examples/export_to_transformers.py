"""Train a model of transformers with the command on 2 ranks, go on with 4, and load the result with transformers.

    python examples/export_to_transformers.py

The model is a small random Llama that stands for one of yours: any folder that `save_pretrained` has written. Each rank
reads only the weights of its own stages, and writes only those.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

RUN = f"""
output = "run"

[model]
source = "huggingface:small-llama"

[data]
source = "{__file__}"
sequence = 64
batch = 8

[pipeline]
ranks = 2
stages = 4
microbatches = 4
schedule = "interleaved-1f1b"

[optimizer]
lr = 1e-2
warmup = 2
decay = "constant"

[training]
steps = 6

[evaluation]
every = 0
"""


def penstock(*arguments: str) -> None:
    """The command, as in a shell."""
    print("$ penstock", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "penstock", *arguments], check=True)


torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
LlamaForCausalLM(config).save_pretrained("small-llama")
Path("run.toml").write_text(RUN)

penstock("train", "run.toml")
penstock("train", "run.toml", "pipeline.ranks=4", "pipeline.schedule=1f1b", "training.steps=12", "--resume")
penstock("checkpoint", "export", "run", "tuned")

steps = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
assert steps == list(range(1, 13))  # 6 on two ranks, 6 on four
tokens = torch.tensor([list(Path(__file__).read_bytes()[:64])])
before, after = (
    AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens, labels=tokens).loss.item()
    for folder in ("small-llama", "tuned")
)
print(f"loss on the first lines of this file: {before:.3f} before, {after:.3f} after")
assert after < before - 0.5
