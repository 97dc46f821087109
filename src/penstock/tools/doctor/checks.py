"""What the ranks of `penstock doctor` do in each check: pipelines against a plain loop, a death, reads by the host."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.errors import PeerFailure
from penstock.schedule import build
from penstock.tools.doctor.ranks import Place
from penstock.tools.parity_check.tensor_trace import check_close

WIDTH, ROWS, STEPS = 64, 8, 3
# Share of a tensor's largest entry: sums in another order, in 32 bits.
TOLERANCE = 1e-4
NAMED_WITHIN = 10.0  # seconds in which a dead rank is to be named
TIMEOUT = 20.0  # Timeout of the pipelines here.


class ResidualLayer(nn.Module):
    """A layer of a residual network, small enough for every machine."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return made


def compare_with_plain_loop(place: Place, family: str) -> dict[str, Any]:
    """Train a few steps with a pipeline and with a plain loop; raise where losses or gradients differ.

    Each step updates the weights, so that what a step leaves behind shows in the next.
    """
    with _pipeline(place, family) as pipe:
        plain = _model(pipe.schedule.stages).to(place.device)
        trained = dict(pipe.named_parameters())
        followed = [dict(plain.named_parameters())[name] for name in trained]
        optimizers = [torch.optim.SGD(each, lr=0.05) for each in (list(trained.values()), list(plain.parameters()))]
        worst = 0.0
        for number in range(STEPS):
            x, y = _batch(place, pipe.microbatches, number)
            loss = pipe.step(x, target=y).loss
            expected = torch.zeros((), device=place.device)
            for part, target in zip(x.chunk(pipe.microbatches), y.chunk(pipe.microbatches), strict=True):
                share = nn.functional.mse_loss(plain(part), target) / pipe.microbatches
                share.backward()  # type: ignore[no-untyped-call]
                expected += share.detach()
            pairs = [("the loss", torch.as_tensor(loss, device=place.device), expected)]
            for name, parameter, other in zip(trained, trained.values(), followed, strict=True):
                if parameter.grad is None or other.grad is None:
                    raise AssertionError(f"step {number + 1}: {name} has no gradient")
                pairs.append((f"the gradient of {name}", parameter.grad, other.grad))
            for what, found, wanted in pairs:
                want, have = wanted.detach().cpu(), found.detach().cpu()
                worst = max(worst, check_close(f"step {number + 1}: {what}", want, have, TOLERANCE))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return {"difference": worst}


def compare_on_threads(place: Place, devices: int) -> dict[str, Any]:
    """Compare ranks that are threads, a device each, with the plain model, dropout and recomputing included."""
    model = nn.Sequential(*[nn.Sequential(ResidualLayer(), nn.Dropout(0.1)) for _ in range(2 * devices)]).to(
        place.device
    )
    x, y = _batch(place, 2 * devices, 0)
    kind = place.device.type
    options = {} if kind == "cpu" else {"devices": [f"{kind}:{index}" for index in range(devices)]}
    found = penstock.parity(
        model,
        x,
        target=y,
        tolerance=TOLERANCE,
        pipeline={
            "stages": 2 * devices,
            "microbatches": 2 * devices,
            "schedule": "zb-v",
            "loss_fn": nn.MSELoss(),
            "recompute": "always",
            **options,
        },
    )
    return {"difference": max(found.output, found.loss, found.gradient)}


def survive_a_death(place: Place) -> dict[str, Any]:
    """Kill the last rank in the middle of a step; return how long the others took to name it."""
    last = place.world - 1
    with _pipeline(place, "1f1b") as pipe:
        pipe.step(*(batch := _batch(place, pipe.microbatches, 0))[:1], target=batch[1])
        if place.rank == last:
            next(iter(pipe.parameters())).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]
        begin = time.monotonic()
        try:
            pipe.step(batch[0], target=batch[1])
        except PeerFailure as failure:
            seconds = time.monotonic() - begin
            if failure.rank != last:
                raise AssertionError(f"rank {last} was killed, and rank {failure.rank} was named: {failure}") from None
        else:
            raise AssertionError(f"rank {last} was killed, and the step ended as if nothing had happened")
    torch.zeros(1, device=place.device).add_(1).cpu()  # a kernel that still waits for the dead rank would be before it
    return {"seconds": seconds}


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations for which the host has to wait until a device is done, by operation."""

    ALWAYS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [each for each in (*args, made) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if each.device.type != "cpu"]
        to_host = name in ("_to_copy", "copy_", "_copy_from") and 0 < len(on_device) < len(tensors)
        waits = not (kwargs or {}).get("non_blocking", name == "copy_" and len(args) > 2 and bool(args[2]))
        if on_device and (name in self.ALWAYS or (to_host and waits)):
            self.found[name] += 1
        return made


def count_host_reads(place: Place) -> dict[str, Any]:
    """Count how often this rank's host waits for its device within one step, after two that were not counted."""
    with _pipeline(place, "1f1b") as pipe:
        for number in range(3):
            batch = _batch(place, pipe.microbatches, number)
            reads = HostReads()
            with reads:
                pipe.step(batch[0], target=batch[1])
        return {"reads": sum(reads.found.values()), "operations": dict(reads.found)}


def _pipeline(place: Place, family: str) -> penstock.Pipeline:
    schedule = build(family, ranks=place.world, microbatches=2 * place.world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return penstock.Pipeline(
            _model(schedule.stages),
            stages=schedule.stages,
            schedule=schedule,
            loss_fn=nn.MSELoss(),
            timeout=TIMEOUT,
            **place.options,
        )


def _model(stages: int) -> nn.Sequential:
    """Return the same model on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(*[ResidualLayer() for _ in range(stages)])


def _batch(place: Place, microbatches: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(ROWS * microbatches, WIDTH, generator=generator, device="cpu") for _ in range(2))
    return x.to(place.device), y.to(place.device)
