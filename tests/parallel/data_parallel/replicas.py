"""A pipeline of two ranks and two replicas, for tests of what replicas promise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deadlines import TIMEOUT
from parallel.cases import same, whole_of
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError

WIDTH, M, ROWS = 6, 4, 12
KINDS = ("ddp", "fsdp")


class Layer(nn.Module):
    """A stage that fails, stalls or leaves when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.traps: Iterator[Callable[[], None]] = iter(())  # of a kind that a failed step does not put back

    def forward(self, x: Tensor) -> Tensor:
        for trap in self.traps:
            trap()
        return torch.tanh(self.linear(x))


def stages(count: int = 4) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer() for _ in range(count)]


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(4)
    return torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made)


def own(mesh: Any, *values: Tensor, rows: tuple[int, int] = (ROWS // 2, ROWS // 2)) -> list[Tensor]:
    replica = mesh.get_local_rank("dp")
    return [value[: rows[0]] if replica == 0 else value[rows[0] : sum(rows)] for value in values]


def pipeline(mesh: Any, modules: Any = None, **options: Any) -> penstock.Pipeline:
    given = {"microbatches": M, "loss_fn": F.mse_loss, "schedule": "zb-v", "timeout": TIMEOUT, "mesh": mesh, **options}
    return penstock.Pipeline(stages() if modules is None else modules, **given)


def gradients(pipe: penstock.Pipeline) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole_of(p.grad).clone() for name, p in pipe.named_parameters()}


def attempt(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str, int | None, float]:
    """The kind of error, its text, the replica it names and how long it took; all begin together."""
    dist.barrier()
    begin = time.monotonic()
    try:
        function(*args, **kwargs)
    except PenstockError as error:
        return type(error).__name__, str(error), getattr(error, "replica", None), time.monotonic() - begin
    return "", "", None, time.monotonic() - begin


def boom() -> None:
    raise ValueError("boom")


def by_name(told: list[dict[str, Any]], take: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """The tensors of all processes together; replicas must agree bit for bit."""
    found: dict[str, Any] = {}
    for rank in told:
        for name, value in take(rank).items():
            assert name not in found or same(found[name], value, exact=True), name
            found[name] = value
    return found


def plain(
    modules: list[nn.Module], x: Tensor, y: Tensor, loss_fn: Callable[..., Tensor], shares: list[float]
) -> tuple[Tensor, dict[str, Any]]:
    """The batch's loss and gradients in one process; two replicas' microbatches, one after the other."""
    whole, total = nn.ModuleList(modules), torch.zeros(())
    parts = [(part, goal) for half in (0, 1) for part, goal in cut(x, y, half)]
    for (part, goal), share in zip(parts, shares, strict=True):
        if not share:
            continue
        out = part
        for module in modules:
            out = module(out)
        loss = loss_fn(out, goal)
        (loss * share).backward()
        total = total + loss.detach() * share
    return total, {name: parameter.grad for name, parameter in whole.named_parameters()}


def cut(x: Tensor, y: Tensor, half: int) -> list[tuple[Tensor, Tensor]]:
    rows = slice(0, ROWS // 2) if half == 0 else slice(ROWS // 2, ROWS)
    return list(zip(x[rows].tensor_split(M), y[rows].tensor_split(M), strict=True))


def close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert value is not None, name
        assert torch.allclose(found[name], value, rtol=tolerance, atol=tolerance), name


ROW_SHARES = [len(part) / ROWS for half in (0, 1) for part, _ in cut(*batch(), half)]
