"""Two checkpoints compared by the names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoint.short_run import penstock_command


@pytest.mark.slow
def test_diff_goes_by_name_across_layouts(trained: tuple[Path, object]) -> None:
    folder = trained[0]
    assert "are the same to the bit" in penstock_command("diff", folder / "step-00000002", folder / "elsewhere")
    text = penstock_command("diff", folder / "step-00000001", folder / "step-00000002", code=1)
    assert "model.embed.weight: " in text
    assert "config.lr: 0.1 and 0.2" in text
    answer = json.loads(penstock_command("diff", folder / "step-00000001", folder, "--json", code=1))
    changes = {each["name"]: each for each in answer["changes"]}
    assert changes["optimizer.embed.weight.step"]["largest"] == 1.0
    assert changes["model.blocks.0.1.num_batches_tracked"]["largest"] == 4.0  # microbatches of one step
    assert answer["steps"] == [1, 2]
