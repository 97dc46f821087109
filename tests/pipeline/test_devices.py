"""Where ranks compute, and that a default device or dtype which the user has set changes nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_processes
from tiers import mostly_slow
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import UsageError

DEFAULTS = [("meta", torch.float32), ("cpu", torch.float64), ("meta", torch.float16)]


def train(folder: str, device: str, dtype: torch.dtype) -> list[list[float]]:
    """What two steps, an evaluation and a third step from a checkpoint make of a model, under the user's defaults."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)) for _ in range(4)]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        pipe = penstock.Pipeline(
            nn.Sequential(*layers), stages=4, microbatches=4, schedule="zb-v", loss_fn=F.mse_loss, seed=3, timeout=30.0
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        found: list[list[float]] = []

        def step() -> None:
            optimizer.zero_grad()
            loss = pipe.step(x, target=y).loss
            norm = pipe.clip_grad_norm_(1.0)
            optimizer.step()
            found.append([float(loss), float(norm), float(pipe.evaluate(x, target=y).loss)])

        with pipe:
            step()
            penstock.save(Path(folder), pipe, optimizer)
            step()
            found += [[float(each.loss)] for each in pipe.train_steps([(x, y)] * 2, optimizer, clip=1.0)]
            penstock.load(Path(folder), pipe, optimizer)
            step()
        return found
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def on_two(folder: str, device: str, dtype: torch.dtype) -> list[list[float]]:
    return train(folder, device, dtype)


@pytest.mark.parametrize(("device", "dtype"), DEFAULTS)
def test_a_default_device_or_dtype_of_the_user_changes_nothing_of_ours_on_threads(
    device: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert train(str(tmp_path / "one"), device, dtype) == train(str(tmp_path / "two"), "cpu", torch.float32)


def kinds_of_links(folder: str, defaults: Any) -> list[list[list[float]]]:
    return [train(f"{folder}/{number}", *each) for number, each in enumerate(defaults)]


@pytest.mark.parametrize("transport", mostly_slow(["shared", "distributed"], "shared"))
def test_a_default_device_or_dtype_of_the_user_changes_nothing_of_ours_on_processes(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TRANSPORT", transport)
    for found in on_processes(2, kinds_of_links, str(tmp_path), [("cpu", torch.float32), *DEFAULTS]):
        assert all(each == found[0] for each in found[1:])


def test_nothing_is_computed_on_meta() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UsageError, match="devices has meta, where nothing is computed"):
        penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=nn.MSELoss(), devices=["meta", "meta"])
