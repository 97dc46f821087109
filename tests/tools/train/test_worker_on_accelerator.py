"""`penstock train` on a pretended accelerator: it is used unless told otherwise, in bf16, with its memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from accelerator.harness import on_device, on_ranks
from tiers import by_turns

from penstock.schedule.builders import TRAINING

TINY = [
    *("model.options.layers=2", "model.options.width=16", "model.options.heads=2", "model.options.dropout=0.1"),
    *("data.sequence=16", "data.batch=8", "pipeline.ranks=2", "pipeline.microbatches=4", "training.steps=6"),
    *("pipeline.schedule=gpipe", "optimizer.warmup=2", "evaluation.every=3", "evaluation.batches=2"),
    *("checkpoint.every=3", "logging.every=1", "logging.tensorboard=off"),
]


def run(folder: str, more: list[str]) -> dict[str, Any]:
    """Train a tiny GPT; the losses, where parameters were, and what was reported of memory."""
    import torch
    from accelerator import pretend

    from penstock import Pipeline
    from penstock.tools.train.config.read import load_config
    from penstock.tools.train.launch.stopping import Stop
    from penstock.tools.train.run.run_folder import RunFolder
    from penstock.tools.train.worker import Job, train_here
    from penstock.writing import save

    torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH).__enter__()
    where: set[str] = set()
    kinds: set[torch.dtype] = set()
    pinned: set[bool] = set()
    step = Pipeline.step

    def watched(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        where.update(str(each.device) for each in self.parameters())
        pinned.update(each.is_pinned() for each in args)
        result = step(self, *args, **kwargs)
        stages = [stage for each in self.deployment.ranks.executors.values() for stage in each.stages.values()]
        kinds.update(dtype for stage in stages if stage.precision for _, dtype in stage.precision.modes if dtype)
        return result

    Pipeline.step = watched  # type: ignore[method-assign]
    text = Path(folder, "text.txt")
    save(text, "the quick brown fox jumps over the lazy dog; " * 200)  # Another rank may read it by now.
    output = Path(folder, "run")
    config = load_config(None, [*TINY, f"data.source={text}", f"output={output}", *more])
    first = int(os.environ.get("RANK", "0")) == 0
    lock = RunFolder(output).prepare(config, resume=False, fresh=True) if first else None
    train_here(Job(config, "penstock train --resume"), Stop())
    if lock is not None:
        lock.free()
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found = {"where": sorted(where), "kinds": sorted(map(str, kinds)), "pinned": sorted(pinned)}
    found["losses"] = [line["loss"] for line in lines if "loss" in line]
    found["memory"] = json.loads((output / "memory.json").read_text())
    found["used"] = [torch.accelerator.max_memory_allocated(pretend.device(index)) for index in range(2)]
    return found


def test_ranks_that_are_threads_train_on_a_device_each(tmp_path: Path) -> None:
    outcome = on_device(run, str(tmp_path), ["pipeline.workers=threads"])
    found = outcome.value
    assert found["where"] == ["pretend:0", "pretend:1"]
    assert found["kinds"] == ["torch.bfloat16"]
    assert found["pinned"] == [True]
    assert outcome.races == []
    assert len(found["losses"]) == 6
    assert found["losses"][-1] < found["losses"][0]
    assert found["memory"][0]["process"] == sum(found["used"]) > 0


@pytest.mark.slow
def test_it_stays_on_the_cpu_where_that_is_asked_for(tmp_path: Path) -> None:
    found = on_device(run, str(tmp_path), ["pipeline.workers=threads", "pipeline.device=cpu"]).value
    assert found["where"] == ["cpu"]
    assert found["kinds"] == []
    assert found["pinned"] == [False]


@pytest.mark.slow
def test_ranks_that_are_processes_train_on_the_device_of_their_local_rank(tmp_path: Path) -> None:
    outcomes = on_ranks(2, run, str(tmp_path), ["pipeline.precision=fp32"])
    assert [outcome.value["where"] for outcome in outcomes] == [["pretend:0"], ["pretend:1"]]
    assert [outcome.races for outcome in outcomes] == [[], []]
    rows = outcomes[0].value["memory"]
    assert [row["process"] for row in rows] == [outcome.value["used"][rank] for rank, outcome in enumerate(outcomes)]
    # Messages have memory of their own: how many of a step's are there at once depends on who is ahead of whom.
    messages = 2 * 4 * (2 * 16 * 16 * 4)
    for row in rows:
        assert row["activations"] > 0
        assert 0.95 * row["process"] - messages <= row["tensors"] <= row["process"]


@pytest.mark.parametrize(
    ("family", "workers"), by_turns(TRAINING, ["threads", "two processes", "four processes"], one_in=6)
)
def test_every_family_trains(family: str, workers: str, tmp_path: Path) -> None:
    """The losses are those of ranks on the CPU."""
    ranks = 4 if workers == "four processes" else 2
    tiny = [f"pipeline.ranks={ranks}", f"pipeline.schedule={family}", f"model.options.layers={2 * ranks}"]
    tiny += ["pipeline.precision=fp32", "model.options.dropout=0.0", "training.steps=3"]
    threads = ["pipeline.workers=threads"]
    if workers == "threads":
        outcomes = [on_device(run, str(tmp_path), [*tiny, *threads])]
    else:
        outcomes = on_ranks(ranks, run, str(tmp_path), tiny)
    assert [each.races for each in outcomes] == [[]] * len(outcomes)
    folder = tmp_path / "cpu"
    folder.mkdir()
    plain = on_device(run, str(folder), [*tiny, *threads, "pipeline.device=cpu"]).value["losses"]
    assert outcomes[0].value["losses"] == pytest.approx(plain, rel=1e-4)


def dry_run(folder: str, limit: int) -> str:
    import torch

    from penstock.tools.train.config.read import load_config
    from penstock.tools.train.dry_run import make_plan

    torch.accelerator.get_memory_info = lambda index=None: (limit, limit)  # type: ignore[assignment]
    text = Path(folder, "text.txt")
    text.write_text("the quick brown fox jumps over the lazy dog; " * 200)
    return make_plan(load_config(None, [*TINY, f"data.source={text}"])).text()


@pytest.mark.parametrize(("limit", "fits"), [(8 << 30, True), (50_000, False)])
def test_a_dry_run_compares_what_it_predicts_with_the_memory_of_a_device(
    limit: int, fits: bool, tmp_path: Path
) -> None:
    said = on_device(dry_run, str(tmp_path), limit).value
    assert f"MB of the {limit / 1e6:,.0f} MB there are on a device" in said
    assert ("that does not fit" in said) is not fits
