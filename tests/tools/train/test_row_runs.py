"""Whole runs on rows, against the loop that anybody would write: every document alone, one mean over a step's targets.

In float64, over several steps, with models that mark the borders of documents in different ways; each run is stopped
in the middle of an epoch and resumed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import mostly_exhaustive
from torch.nn import functional as F
from train_jobs import StopAt

from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.data.batches import open_data
from penstock.tools.train.launch.stopping import INTERRUPTED, Stop
from penstock.tools.train.run.metrics import read_metrics
from penstock.tools.train.run.run_folder import RunFolder
from penstock.tools.train.worker import Job, train_here

OWN = """
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig, Qwen2Config

SHAPE = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
SHAPE |= dict(num_key_value_heads=2, use_cache=False)
SMALL = dict(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False)
MODELS = {
    "qwen2": Qwen2Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=3),
    "gpt2": GPT2Config(**SMALL, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}

def model(kind):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(MODELS[kind]).double()
"""
COMMON = [
    "model.source=own_rows:model",
    "data.format=input_ids",
    "data.sequence=16",
    "data.batch=8",
    "data.validation=0",
    "data.window=7",
    "pipeline.ranks=2",
    "pipeline.microbatches=2",
    "pipeline.workers=threads",
    "training.steps=4",
    "training.accumulate=2",
    "loss.label_smoothing=0.1",
    "optimizer.lr=0.01",
    "optimizer.warmup=0",
    "optimizer.decay=constant",
    "evaluation.every=0",
    "checkpoint.every=0",
    "logging.tensorboard=off",
]


def alone(batch: DataBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The documents of a batch: tokens and targets of each."""
    found = []
    for number, (ids, target) in enumerate(zip(batch.kwargs["input_ids"], batch.target, strict=True)):
        if "position_ids" in batch.kwargs:
            starts = [place for place, position in enumerate(batch.kwargs["position_ids"][number]) if position == 0]
            lengths = [end - begin for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
        else:
            starts, lengths = [0], [int(batch.kwargs["attention_mask"][number].sum())]
        found += [(ids[at : at + size], target[at : at + size]) for at, size in zip(starts, lengths, strict=True)]
    return [(ids, target) for ids, target in found if (target != -100).any()]


def plain_losses(config: TrainConfig, frozen: str) -> list[float]:
    model = sys.modules["own_rows"].model(**config.model.options).train()
    decays: dict[float, list[Any]] = {0.0: [], config.optimizer.weight_decay: []}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
        if name != frozen:
            decays[0.0 if parameter.dim() < 2 else config.optimizer.weight_decay].append(parameter)
    groups = [{"params": params, "weight_decay": decay} for decay, params in decays.items()]
    betas = (config.optimizer.betas[0], config.optimizer.betas[1])
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=betas, eps=config.optimizer.eps)
    data, found = open_data(config), []
    for step in range(config.training.steps):
        documents = [each for half in (0, 1) for each in alone(data.at(2 * step + half))]
        total = sum(int((target != -100).sum()) for _, target in documents)
        losses = [
            F.cross_entropy(model(ids[None]).logits[0], target, label_smoothing=0.1, reduction="sum") / total
            for ids, target in documents
        ]
        loss = torch.stack(losses).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip or 1e9)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


RUNS: list[Any] = [
    ("qwen2", "model.embed_tokens.weight", ["data.packing=true", "data.streaming=true"]),
    ("mistral", "model.norm.weight", ["data.packing=true"]),
    ("gpt2", "transformer.wpe.weight", ["data.packing=true"]),
    ("gpt2", "transformer.wpe.weight", ["data.streaming=true"]),
    ("mistral", "model.norm.weight", ["data.max_tokens=32"]),
]


@pytest.mark.parametrize(
    ("kind", "frozen", "settings"),
    mostly_exhaustive(RUNS, RUNS[0], RUNS[3], RUNS[4]),
    ids=["qwen2-packed-streaming", "mistral-packed", "gpt2-packed", "gpt2-padded-streaming", "mistral-by-tokens"],
)
def test_a_run_that_was_stopped_has_the_losses_of_documents_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, frozen: str, settings: list[str]
) -> None:
    (tmp_path / "own_rows.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(2, 15, (23,), generator=draw).tolist()
    rows = [torch.randint(0, 40, (size,), generator=draw).tolist() for size in sizes]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    own = [f"model.options={{kind='{kind}'}}", f"data.source={tmp_path / 'rows.jsonl'}", f"output={tmp_path / 'run'}"]
    config = load_config(None, [*COMMON, *own, *settings, f"training.freeze=['{frozen}']"])
    check_consistent(config)
    folder = RunFolder(tmp_path / "run")
    folder.prepare(config, resume=False, fresh=False).free()
    assert train_here(Job(config, ""), StopAt(2)) == INTERRUPTED
    folder.prepare(config, resume=True, fresh=False).free()
    assert train_here(Job(config, ""), Stop()) == 0
    losses = [line["loss"] for line in read_metrics(folder.metrics)]
    assert losses == pytest.approx(plain_losses(config, frozen), rel=1e-10)
    assert losses[-1] < losses[0]
