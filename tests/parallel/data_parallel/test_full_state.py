"""The whole model's state from replicas, shards and spread tensors: what a plain loop on all rows would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import spread
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError

W, M, ROWS, STEPS = 6, 2, 8, 3


class Layer(nn.Module):
    """With a buffer that follows the rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.register_buffer("most", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.most.copy_(torch.maximum(self.most, x.detach().amax()))
        return torch.tanh(self.linear(x)) + x


def model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = nn.Sequential(*(Layer() for _ in range(4))).double()
    made[3].linear.weight = made[0].linear.weight
    return made


def batch() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, W, generator=source, dtype=torch.float64)
    return x, y


def trained(rows: slice) -> nn.Sequential:
    """The plain loop on all rows; buffers are those that only some rows would leave."""
    found, seen, (x, y) = model(), model(), batch()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        now = {name: value for name, value in found.state_dict().items() if "most" not in name}
        seen.load_state_dict(now, strict=False)
        seen(x[rows])
        F.mse_loss(found(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found.load_state_dict({name: value for name, value in seen.state_dict().items() if "most" in name}, strict=False)
    return found


def train(pipe: penstock.Pipeline, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()


def is_the_state(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert type(state[name]) is Tensor
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)


def of_replicas(kind: str) -> list[str]:
    mesh = penstock.mesh(pp=2, dp=2)
    net, (x, y) = model(), (each.chunk(2)[mesh.get_local_rank("dp")] for each in batch())
    wanted = trained(slice(0, ROWS // 2)).state_dict()  # of the first replica
    said = []
    with penstock.Pipeline(
        net,
        stages=2,
        microbatches=M,
        loss_fn=F.mse_loss,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(replicate=kind),
        timeout=30,
    ) as pipe:
        train(pipe, x, y)
        state = pipe.full_state_dict()
        is_the_state(state, wanted)
        assert state["0.linear.weight"] is state["3.linear.weight"]
        only = pipe.full_state_dict(rank=0)
        assert bool(only) == (dist.get_rank() == 0)
        is_the_state(only, wanted if only else {})
        for use in (lambda: net.eval()(x), net.state_dict, pipe.fill_model):
            try:
                use()
                said.append("")
            except (PenstockError, RuntimeError) as error:
                said.append(str(error))
        net.train()
        if kind == "ddp":
            mine = trained(slice(0, 4) if mesh.get_local_rank("dp") == 0 else slice(4, 8)).state_dict()
            is_the_state(net.state_dict(), mine)  # buffers are those of this replica
        pipe.load_state_dict(state)
        with pytest.raises((PenstockError, RuntimeError)):
            net.state_dict()
        pipe.step(x, target=y)
    return said


def of_spread(replicate: str | None) -> None:
    mesh = penstock.mesh(pp=1 if replicate else 2, dp=2 if replicate else 1, tp=2)
    case = spread.Case(replicate=replicate, tied=True, stages=2)
    ids, target = (each.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for each in spread.batch())
    with penstock.Pipeline(
        spread.model(tied=True),
        stages=mesh["pp"].size(),
        microbatches=M,
        loss_fn=spread.loss_fn,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(replicate=replicate, tensor_plan=case.tensor_plan()),
        timeout=30,
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for _ in range(2):
            pipe.step(ids, target=target)
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = spread.plain(tied=True)
        wanted = {name: found.get(name, found["0.weight"]) for name in spread.model(tied=True).state_dict()}
        is_the_state(pipe.full_state_dict(), wanted)


def all_kinds() -> dict[str, Any]:
    of_spread(None)
    of_spread("fsdp")
    return {kind: of_replicas(kind) for kind in ("ddp", "fsdp")}


@pytest.mark.slow
def test_the_state_is_put_together_and_the_same_on_all_ranks() -> None:
    for number, told in enumerate(on_processes(4, all_kinds)):
        other = 1 - number // 2
        for kind, (forward, state, filled) in told.items():
            for said in (forward, state) if kind == "ddp" else (forward or "mixed", state):
                assert f"its values are on rank {other} (stage {other})" in said or kind == "fsdp"
            assert ("load pipe.full_state_dict() into a new model" in filled) == (kind == "fsdp")
