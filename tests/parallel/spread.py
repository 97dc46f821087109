"""A transformer for tensor parallelism, its plans, and cases over pp, dp and tp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from parallel.cases import whole_of
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

import penstock

WIDTH, HEADS, WORDS, LENGTH, M, ROWS = 8, 4, 12, 6, 2, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.join = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        out: Tensor = self.join(seen.transpose(1, 2).flatten(2))
        return out


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.network = Attention(), Network()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        out: Tensor = x + self.network(self.second(x))
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scores(self.norm(x))
        return out


def model(tied: bool = False) -> nn.Sequential:
    """Embedding, four blocks, head: six layers that are cut by position."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(4)), Head()).double()
    if tied:
        made[5].scores.weight = made[0].weight  # type: ignore[union-attr]
    return made


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(5))
    return ids, ids.roll(-1, 1)


PLAIN: dict[str, Any] = {
    "0": "embedding",
    "*.attention.query": "colwise",
    "*.attention.key": "colwise",
    "*.attention.value": "colwise",
    "*.attention.join": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    "5.scores": "colwise-gathered",
}


def sequence_plan(loss_parallel: bool) -> penstock.TensorPlan:
    """Between blocks the sequence is spread, as DTensors that cross from stage to stage."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    spread_out = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    scores = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    return penstock.TensorPlan(
        {
            **PLAIN,
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "*.first": SequenceParallel(),
            "*.second": SequenceParallel(),
            "*.attention": whole,
            "*.network": whole,
            "*.attention.join": spread_out,
            "*.down": spread_out,
            "5.norm": SequenceParallel(),
            "5.scores": scores,
        },
        loss_parallel=loss_parallel,
    )


@dataclass(frozen=True)
class Case:
    schedule: str = "1f1b"
    plan: str = "plain"  # or sequence, loss
    replicate: str | None = None
    tied: bool = False
    stages: int = 2

    def __str__(self) -> str:
        return f"{self.schedule}-{self.plan}-{self.replicate}-{'tied' if self.tied else 'apart'}-{self.stages}stages"

    def tensor_plan(self) -> Any:
        return PLAIN if self.plan == "plain" else sequence_plan(self.plan == "loss")


def plain(tied: bool) -> dict[str, Any]:
    """Two steps of SGD on the whole batch, in one process; and the norm of the last gradients."""
    whole = model(tied)
    ids, target = batch()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    found: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_fn(whole(ids), target)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found["norm"] = nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    found["evaluated"] = loss_fn(whole(ids), target).detach()
    found["output"] = whole(ids).detach()
    for name, parameter in whole.named_parameters():
        found[name], found[f"{name}.grad"] = parameter.detach(), parameter.grad
    return found


def pipelined(case: Case, mesh: Any) -> dict[str, Any]:
    ids, target = batch()
    replicas = mesh["dp"].size()
    ids, target = (each.chunk(replicas)[mesh.get_local_rank("dp")] for each in (ids, target))
    made = model(case.tied)
    if mesh.get_local_rank("dp") or mesh.get_local_rank("tp"):
        for parameter in made.parameters():
            nn.init.zeros_(parameter)  # only the first copy of each stage has the true values
    found: dict[str, Any] = {}
    with penstock.Pipeline(
        made,
        stages=case.stages,
        microbatches=M,
        schedule=case.schedule,
        loss_fn=loss_fn,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(replicate=case.replicate, tensor_plan=case.tensor_plan()),
        timeout=30,
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for step in range(2):
            optimizer.zero_grad()
            result = pipe.step(ids, target=target)
            found[f"loss {step}"] = result.loss
            found["norm"] = pipe.clip_grad_norm_(0.5)
            optimizer.step()
        found["evaluated"] = pipe.evaluate(ids, target=target).loss
        found["output"] = pipe.predict(ids)
        found["local"] = sum(getattr(p, "_local_tensor", p).numel() for p in pipe.parameters())
        for name, parameter in pipe.named_parameters():
            found[name], found[f"{name}.grad"] = whole_of(parameter.detach()), whole_of(parameter.grad)
    return found


def all_pipelined(cases: list[Case], sizes: dict[str, int]) -> list[dict[str, Any]]:
    mesh = penstock.mesh(**sizes)
    return [pipelined(case, mesh) for case in cases]
