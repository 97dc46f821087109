"""How well the hardware is used: model FLOPs per token, the peak of the devices, and their ratio with the speed (MFU).

A token costs, in forward and backward:

    4 N + 2 T + 12 L A S

N: parameters that multiply (two dimensions or more; embeddings only look up; of experts, the share that a token visits)
T: those of N that are trained, whose gradient is a third product
L, A, S: layers, numbers for a token in attention (heads x size of a head), tokens in a row

With everything trained that is the well-known 6 N + 12 L A S. Recomputed forwards are not counted, as is usual for
model FLOPs, and neither is that causal attention needs only half of its products.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.processes import Processes
from penstock.pipeline import Pipeline
from penstock.tools.train.config.device import device_of, precision_of
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.data.batch import DataBatch

# dense FLOP/s of one device by a part of its name, from the vendors' data sheets: bfloat16 or float16, then float32 (as
# TensorFloat-32 where there is such). The first that matches counts.
PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2.25e15, 1.1e15),
    ("H200", 989e12, 494e12),
    ("H100 PCIe", 756e12, 378e12),
    ("H100", 989e12, 494e12),
    ("A100", 312e12, 156e12),
    ("L40S", 362e12, 183e12),
    ("L4", 121e12, 60e12),
    ("A6000", 155e12, 77e12),
    ("A10", 125e12, 62e12),
    ("RTX 4090", 165e12, 83e12),
    ("RTX 3090", 71e12, 36e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
    ("MI300X", 1307e12, 654e12),
    ("MI250", 383e12, 96e12),
)
SIZE, TRIALS = 512, 5  # A CPU is measured with this product, of 0.3 GFLOP.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def utilisation(config: TrainConfig, pipe: Pipeline, batch: DataBatch) -> tuple[float | None, str]:
    """Return MFU at one token per second, and how the peak is known; None where it is not, or rows have no tokens.

    Called on every rank, so that ranks that share cores are measured while the others compute as well.
    """
    ids = next((value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor)), None)
    peaks = Processes(pipe, "penstock train").exchange(peak_flops(config))
    if ids is None or ids.is_floating_point() or ids.dim() < 2:
        return None, "rows have no tokens"
    if any(peak is None for peak in peaks):
        return None, "the peak of a device is not known; set logging.peak_flops"
    total = sum(peak for peak, _ in peaks)
    model = pipe.deployment.staged.model
    return flops_per_token(model, ids.shape[-1]) / total, f"{total / 1e12:.3g} TFLOP/s, {peaks[0][1]}"


def flops_per_token(model: nn.Module | Sequence[nn.Module], sequence: int) -> float:
    """Count model FLOPs of one token, forward and backward; before a first step lets go of what other ranks hold."""
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    shape = getattr(whole, "config", None)
    looked_up = {id(module.weight) for module in whole.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(module.weight) for module in whole.modules() if isinstance(module, nn.Linear)}  # tied: both
    visited = _share_of_experts(shape)
    multiplied = trained = 0.0
    for name, parameter in whole.named_parameters():
        if parameter.dim() < 2 or id(parameter) in looked_up:
            continue
        count = parameter.numel() * (visited if ".experts." in name else 1.0)
        multiplied += count
        trained += count if parameter.requires_grad else 0.0
    layers, attended = _attention(whole, shape)
    return 4 * multiplied + 2 * trained + 12 * layers * attended * sequence


def _share_of_experts(shape: Any) -> float:
    chosen = getattr(shape, "num_experts_per_tok", None)
    every = next((count for name in EXPERTS if (count := getattr(shape, name, None))), None)
    return chosen / every if chosen and every else 1.0


def _attention(whole: nn.Module, shape: Any) -> tuple[int, int]:
    """Return the layers with attention, and numbers for a token in it; 0 where that is not known."""
    layers, width = getattr(shape, "num_hidden_layers", 0), getattr(shape, "hidden_size", 0)
    heads, size = getattr(shape, "num_attention_heads", 0), getattr(shape, "head_dim", None)
    if layers and width:
        return layers, heads * size if heads and size else width
    blocks = [module for module in whole.modules() if type(module).__name__ == "Block" and hasattr(module, "heads")]
    return len(blocks), blocks[0].join.in_features if blocks else 0  # type: ignore[union-attr, return-value]


def peak_flops(config: TrainConfig) -> tuple[float, str] | None:
    """Return the most FLOP/s of this process's device, and how that is known; None for one that is in no table."""
    half = precision_of(config) != "fp32"
    if config.logging.peak_flops is not None:
        return config.logging.peak_flops, "logging.peak_flops"
    if (kind := device_of(config)) is not None:
        device = getattr(torch.get_device_module(kind), "get_device_name", lambda: kind)()
        found = next((row for row in PEAKS if row[0].lower() in device.lower()), None)
        return None if found is None else (found[1] if half else found[2], f"{found[0]}, data sheet")
    return _measured(torch.bfloat16 if precision_of(config) == "bf16" else torch.float32), "measured"


def _measured(dtype: torch.dtype) -> float:
    """Measure the fastest of a few matrix products on this process's threads, in some hundredths of a second."""
    left, right = torch.ones(SIZE, SIZE, dtype=dtype, device="cpu"), torch.ones(SIZE, SIZE, dtype=dtype, device="cpu")
    times = []
    for _ in range(TRIALS):
        begin = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - begin)
    return float(2 * SIZE**3 / min(times))
