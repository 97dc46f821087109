"""Fine-tune a small random Llama as a pipeline of 4 stages, with a loop and checkpoints of your own.

    python examples/finetune_llama.py                              ranks are threads of this process
    torchrun --nproc-per-node 4 examples/finetune_llama.py         ranks are processes

Stop it at any moment and start it again, in either way: it goes on where the last checkpoint was. In the place of the
random model, use AutoModelForCausalLM.from_pretrained(...); everything else stays.
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

steps, folder = int(sys.argv[1]) if len(sys.argv) > 1 else 40, "runs/llama"
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4)
model = LlamaForCausalLM(config)
text = torch.tensor(list(Path(__file__).read_bytes()))  # bytes of this file: something to learn


def batch(step: int) -> torch.Tensor:
    """16 pieces of 64 bytes, the same ones whenever that step is run."""
    starts = torch.randint(0, len(text) - 64, (16,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + 64] for start in starts])


ids = batch(0)
pipe = penstock.Pipeline(model, stages=4, microbatches=4, example={"input_ids": ids[:4], "labels": ids[:4]})
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
with penstock.Checkpointer(folder, keep_last=2) as checkpointer:
    done = 0
    if checkpointer.latest() is not None:
        done = checkpointer.load(pipe, optimizer, scheduler=schedule).step
    for step in range(done + 1, steps + 1):
        ids = batch(step)
        loss = pipe.step(input_ids=ids, labels=ids).loss  # the model's own loss, the same on every rank
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step(), optimizer.zero_grad(), schedule.step()
        if step % 10 == 0 or step == steps:
            checkpointer.save(step, pipe, optimizer, scheduler=schedule)  # training goes on meanwhile
            if pipe.is_first:
                print(f"step {step}  loss {loss:.4f}  norm {norm:.2f}", flush=True)
pipe.close()
# `penstock checkpoint export runs/llama llama` writes what LlamaForCausalLM.from_pretrained("llama") takes.
