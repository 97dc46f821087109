"""What loading and saving a large folder takes: a rank's own share of the weights, and little more.

The peak is the system's own count of resident memory (VmHWM), reset before each part, so that nothing is sampled.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_processes

from penstock.tools.train.build import build_model, build_pipeline
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batch import DataBatch

WIDTH, LAYERS, WORDS = 1024, 9, 2048
RESET = Path("/proc/self/clear_refs")
BYTES = 4 * (LAYERS * 5 * WIDTH * WIDTH + 2 * WORDS * WIDTH)  # without norms, which are small


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and how many bytes more than before it were resident at most."""
    gc.collect()
    RESET.write_text("5")
    before = resident("VmRSS")
    found = work()
    return found, resident("VmHWM") - before


def load_and_save(source: str, target: str) -> tuple[int, int, int]:
    """On a rank: the bytes of its own parameters, the peak while loading them, and the peak while saving."""
    settings = ["data.batch=4", "data.sequence=8", "pipeline.ranks=2", "pipeline.microbatches=2"]
    config = load_config(None, [f"model.source=huggingface:{source}", *settings])
    ids = torch.zeros(4, 8, dtype=torch.int64)
    batch = DataBatch((), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids, 32)
    model, _ = build_model(config)  # without memory for its values
    tiny = ["model.init=random", "model.options={num_hidden_layers=2, hidden_size=8, intermediate_size=8}"]
    small = load_config(None, [f"model.source=huggingface:{source}", *settings, *tiny])
    build_pipeline(small, build_model(small)[0], None, batch, ranks=2).close()  # loads code, which is not weights
    pipe, loading = peak(lambda: build_pipeline(config, model, None, batch, ranks=2))
    own = sum(each.numel() * each.element_size() for each in pipe.parameters())
    _, saving = peak(lambda: pipe.save_pretrained(target))
    pipe.close()
    return own, loading, saving


@pytest.mark.slow
@pytest.mark.skipif(not RESET.exists(), reason="the system does not count a peak that can be reset")
def test_a_rank_loads_its_share_of_a_sharded_folder_and_saves_without_the_rest(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH // 3, "num_hidden_layers": LAYERS}
    shape = LlamaConfig(vocab_size=WORDS, num_attention_heads=8, num_key_value_heads=8, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(shape)
    model = model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, number)
    model.save_pretrained(tmp_path / "model", max_shard_size="40MB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= 5
    del model
    found = on_processes(2, load_and_save, str(tmp_path / "model"), str(tmp_path / "copy"))
    assert sum(own for own, _, _ in found) == pytest.approx(BYTES, rel=0.05)
    for own, loading, saving in found:
        assert loading <= 1.1 * own
        assert saving <= 0.2 * own  # a few pieces of tensors at a time
    again = LlamaForCausalLM.from_pretrained(tmp_path / "copy")
    assert all(bool((parameter == number).all()) for number, parameter in enumerate(again.parameters()))
