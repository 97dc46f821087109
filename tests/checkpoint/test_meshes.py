"""Any other width: replicas, shards and stages exchanged for each other, the optimizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from tiers import tiers
from torch import Tensor, nn
from train_runs import LAYOUTS, Data, Run, loss_of

import penstock

WIDTHS: dict[str, dict[str, Any]] = {
    "4 stages": {"pp": 4},
    "2 stages, 2 replicas": {"pp": 2, "dp": 2, "replicate": "ddp"},
    "2 stages, 2 shards": {"pp": 2, "dp": 2, "replicate": "fsdp"},
    "1 stage, 4 shards": {"pp": 1, "dp": 4, "replicate": "fsdp"},
}


class Share(Data):
    """A replica's rows of each batch; its state also says whose it is."""

    def __init__(self, index: int, replicas: int) -> None:
        super().__init__()
        self.index, self.replicas = index, replicas

    def next(self) -> Tensor:
        return super().next().chunk(self.replicas)[self.index]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "of": self.index}


def made(width: dict[str, Any], seed: int = 0) -> Run:
    mesh = penstock.mesh(pp=width["pp"], dp=width.get("dp", 1))
    replicas = width.get("dp", 1)
    options = {"mesh": mesh, "stages": width["pp"], "schedule": "1f1b" if width["pp"] > 1 else "gpipe"}
    if replicas > 1:
        options["parallel_options"] = penstock.ParallelOptions(replicate=width["replicate"])
    # Few rows a replica: two microbatches. No dropout or batch statistics, which depend on who has which rows.
    run = Run(seed=seed, plain=True, microbatches=8 // replicas, **options)
    run.data = Share(run.pipe.deployment.replication.index, replicas)
    return run


def close_to(losses: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=2e-5, atol=1e-6)


def pairs(folder: str, sources: int) -> dict[str, list[float]]:
    """Each width resumes from so many: those that come after it, and last from its own."""
    place = Path(folder)
    after = {}
    for name, width in WIDTHS.items():
        run = made(width)
        run.steps(2)
        penstock.save(place / name, run.pipe, run.optimizer, step=2, **run.parts())
        after[name] = run.steps(2)
        run.close()
    for number, (target, width) in enumerate(WIDTHS.items()):
        run = made(width, seed=9)  # one for all: nothing of what it was loaded with before may stay
        for source in reversed((list(WIDTHS) * 2)[number : number + sources]):
            loaded = penstock.load(place / source, run.pipe, run.optimizer, **run.parts())
            assert loaded.same_layout == (source == target)
            losses = run.steps(2)
            if source == target:
                assert losses == after[source]
            else:
                close_to(losses, after[source])
        run.close()
    own_buffers(place)
    after["spread and tied"] = spread_and_tied(place)
    dist.barrier()
    return after


def own_buffers(place: Path) -> None:
    """Buffers follow a replica's own batches: each gets its own back, and who has none gets the first's."""
    run = made(WIDTHS["2 stages, 2 replicas"])
    buffers = [buffer for _, buffer in run.pipe.named_buffers()]
    for buffer in buffers:
        buffer.fill_(float(dist.get_rank() + 1))
    penstock.save(place / "buffers", run.pipe)
    for buffer in buffers:
        buffer.zero_()
    penstock.load(place / "buffers", run.pipe)
    assert all(bool((buffer == dist.get_rank() + 1).all()) for buffer in buffers)
    run.close()
    other = made(WIDTHS["2 stages, 2 shards"])
    penstock.load(place / "buffers", other.pipe)
    first = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}[dist.get_rank()]  # pp is the outer axis: ranks 0 and 2 are replica 0
    assert all(bool((buffer == first).all()) for _, buffer in other.pipe.named_buffers())
    other.close()


def tied_run(**options: Any) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)]
    layers[3].weight = layers[0].weight
    pipe = penstock.Pipeline(nn.Sequential(*layers), stages=4, microbatches=2, loss_fn=loss_of, **options)
    return pipe, torch.optim.Adam(pipe.parameters(), lr=1e-2)


def two_steps(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        batch = torch.arange(48).reshape(8, 6) % 12
        losses.append(pipe.step(batch, target=batch).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def spread_and_tied(place: Path) -> list[float]:
    """Over tp, another object takes a parameter's place: the tied one has one name all the same."""
    options = {
        "mesh": penstock.mesh(pp=2, tp=2),
        "schedule": "interleaved-1f1b",
        "parallel_options": penstock.ParallelOptions(tensor_plan={"0": "embedding", "3": "colwise-gathered"}),
    }
    run = tied_run(**options)
    two_steps(*run)
    penstock.save(place / "spread and tied", *run)
    after = two_steps(*run)
    run[0].close()
    run = tied_run(**options)
    penstock.load(place / "spread and tied", *run)
    assert two_steps(*run) == after
    run[0].close()
    return after


@pytest.mark.timeout(900)  # many pairs of layouts in one launch
@pytest.mark.parametrize("sources", tiers(3, len(WIDTHS)))
def test_every_width_resumes_from_others(tmp_path: Path, sources: int) -> None:
    told = on_processes(4, pairs, str(tmp_path), sources)
    assert all(each == told[0] for each in told)
    run = tied_run()
    penstock.load(tmp_path / "spread and tied", *run)
    close_to(two_steps(*run), told[0].pop("spread and tied"))
    threads = Run(seed=5, plain=True, microbatches=8, **LAYOUTS["two stages"])
    for source, losses in told[0].items():
        penstock.load(tmp_path / source, threads.pipe, threads.optimizer, **threads.parts())
        close_to(threads.steps(2), losses)
    threads.close()
