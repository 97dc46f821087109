"""Overlapped pairs: the all-to-all of one microbatch's experts travels while the other microbatch computes.

`dualpipe-v` pairs a forward of one microbatch with a backward of another, and the default runs them one after the
other. The handler below runs them in turns: whoever starts a message lets the other half compute until that starts
one of its own.

    forward   attend | dispatch ~~~~~~~~~~ | experts | combine ~~~~~~~~~~ | add
    backward         | add | combine ~~~~~~~~~~~~~~~ | experts | dispatch ~~~~~~ | attend

Only one half computes at any time, and the program alone decides which. So all ranks of a group of experts start
their messages in the same order, as collectives must be, and the results do not depend on timing.

`python examples/overlap_moe.py [FOLDER]` starts four processes: a pipeline of two ranks, with its experts on two. It
trains with the default and with the handler, beside one process, and writes both timelines into FOLDER for
`penstock view`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.schedule import Action, Op

WIDTH, EXPERTS, LENGTH = 16, 4, 6
DEPTHS = (1, 2, 1, 1)  # layers of each stage; the halves of a pair need not have as many messages


# -- the handler


class Stopped(Exception):
    """This half cannot go on, because the other one has failed. The other one's error is the one to tell."""


class Baton:
    """Two threads, of which the one that has it runs, until it gives way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = [0, 1]
        self._now = 0
        self._failed = False

    def run(self, me: int, work: Callable[[], None]) -> None:
        """Do `work` as number `me` of the two."""
        _here.baton, _here.me = self, me
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._now == me)
            work()
        except BaseException:
            self._failed = True
            raise
        finally:
            _here.baton = None
            with self._changed:
                self._running.remove(me)
                self._now = 1 - me
                self._changed.notify_all()

    def check(self) -> None:
        """Before a message: those of a half that failed are missing, so this one would be taken for one of them."""
        if self._failed:
            raise Stopped("the other half of the pair has failed")

    def give_way(self, me: int) -> bool:
        """Let the other one run until it gives way or ends; whether there is one."""
        with self._changed:
            if len(self._running) < 2:
                return False
            drawn = torch.get_rng_state()  # torch has one generator for all threads
            self._now = 1 - me
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._now == me)
        torch.set_rng_state(drawn)
        return True


_here = threading.local()  # .baton, .me: of the pair that this thread runs a half of
_beside = ThreadPoolExecutor()


def overlap(action: Action, context: Any) -> None:
    """For OVERLAP_F_B and OVERLAP_B_F: both halves in turns, the first half first."""
    context.fetch(action)  # what both need from other ranks
    first, second = action.parts()
    baton = Baton()
    other = _beside.submit(baton.run, 1, lambda: context.compute(second))
    try:
        baton.run(0, lambda: context.compute(first))
    except Stopped:
        other.result()  # raises why
    except BaseException:
        wait([other])
        raise
    other.result()


# -- messages


class Message(NamedTuple):
    """When it was started, waited for, and there; whether the other half ran in between."""

    started: float
    awaited: float
    arrived: float
    overlapped: bool


class Wire:
    """All-to-alls of a group of experts. `latency`: seconds that each takes at least, as over a slow network."""

    def __init__(self, group: Any, latency: float = 0.0) -> None:
        self.group = group
        self.latency = latency
        self.ranks = dist.get_world_size(group)
        self.log: list[Message] = []
        members = dist.get_process_group_ranks(group)
        self._news = dist.PrefixStore(f"experts on {members}", dist.distributed_c10d._get_default_store())

    def exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """The next `send[r]` rows go to rank r; `receive[r]` come from there."""
        rows, arrived = rows.contiguous(), rows.new_empty((sum(receive), *rows.shape[1:]))
        baton = getattr(_here, "baton", None)
        if baton is not None:
            baton.check()
        started = time.perf_counter()
        handle = dist.all_to_all_single(arrived, rows, receive, send, group=self.group, async_op=True)
        overlapped = baton is not None and baton.give_way(_here.me)
        awaited = time.perf_counter()
        self.wait(handle)
        time.sleep(max(0.0, started + self.latency - time.perf_counter()))
        self.log.append(Message(started, awaited, time.perf_counter(), overlapped))
        return arrived

    def wait(self, handle: Any) -> None:
        """Until the message is there, or a rank of the group says that it has failed, and will send no more."""
        there = threading.Event()
        handle.get_future().add_done_callback(lambda _: there.set())
        while not there.wait(0.2):
            self.hear()
        try:
            handle.wait()
        except RuntimeError:  # the connection is lost
            self.hear()
            raise

    def hear(self) -> None:
        """Raise what another rank has told."""
        if self._news.check(["failed"]):
            raise RuntimeError(f"another rank of the experts' group: {self._news.get('failed').decode()}")

    def fail(self, error: BaseException) -> None:
        """Tell the group, whose other ranks wait for messages that will not come."""
        if not self._news.check(["failed"]):
            self._news.set("failed", str(error).partition("\n")[0])


class AllToAll(torch.autograd.Function):
    """The gradient of what went to a rank comes back from it."""

    @staticmethod
    def forward(context: Any, rows: Tensor, wire: Wire, send: list[int], receive: list[int]) -> Tensor:
        context.wire, context.send, context.receive = wire, send, receive
        return wire.exchange(rows, send, receive)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return context.wire.exchange(gradient, context.receive, context.send), None, None, None


# -- the model


class Layer(nn.Module):
    """Attention, then for each token the best of the experts, which are on this rank or, with a wire, on several."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(drop)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict(
            {
                str(number): nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
                for number in range(EXPERTS)
            }
        )
        self.wire: Wire | None = None

    def spread(self, wire: Wire, rank: int) -> None:
        """Keep the experts of this rank alone."""
        self.wire = wire
        count = EXPERTS // wire.ranks
        for number in range(EXPERTS):
            if number // count != rank:
                del self.experts[str(number)]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.join(F.scaled_dot_product_attention(*self.project(self.first(x)).chunk(3, dim=-1)))
        tokens = self.second(x).flatten(0, 1)
        weight, expert = self.router(tokens).softmax(dim=-1).max(dim=-1)
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=EXPERTS)
        found = self.run_here(tokens[order], counts) if self.wire is None else self.run_there(tokens[order], counts)
        found = torch.zeros_like(tokens).index_copy(0, order, found)
        return x + self.drop(weight[:, None] * found).view_as(x)

    def run_there(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Dispatch, experts, combine. The sizes go first, because a receiver must know them."""
        assert self.wire is not None
        ranks, own = self.wire.ranks, len(self.experts)
        coming = self.wire.exchange(counts, [own] * ranks, [own] * ranks)
        send, receive = counts.view(ranks, own).sum(1).tolist(), coming.view(ranks, own).sum(1).tolist()
        rows = AllToAll.apply(tokens, self.wire, send, receive)
        which = torch.arange(own).repeat(ranks).repeat_interleave(coming)
        order = which.argsort(stable=True)
        results = self.run_here(rows[order], torch.bincount(which, minlength=own))
        results = torch.zeros_like(rows).index_copy(0, order, results)
        return AllToAll.apply(results, self.wire, receive, send)

    def run_here(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens sorted by expert."""
        parts = zip(self.experts.values(), tokens.split(counts.tolist()), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


def make_stages(drop: float = 0.0) -> list[nn.Module]:
    """One seed: the same on every rank."""
    torch.manual_seed(0)
    return [nn.Sequential(*[Layer(drop) for _ in range(depth)]).double() for depth in DEPTHS]


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step + 1)
    x, y = (torch.randn(24, LENGTH, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    return x, y


# -- training


class Trained(NamedTuple):
    """What is compared, and what is shown."""

    losses: list[float]
    weights: dict[str, Tensor]
    messages: list[Message]
    timeline: Any
    seconds: float  # of the last step


def train_alone(steps: int) -> Trained:
    """One process: all experts, the whole batch."""
    model = nn.Sequential(*make_stages())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = make_batch(step)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return Trained(losses, weights, [], None, 0.0)


def train(
    mesh: Any,
    steps: int,
    *,
    handler: Any,
    latency: float = 0.0,
    schedule: Any = "dualpipe-v",
    drop: float = 0.0,
    recompute: str = "never",
) -> Trained:
    """On a mesh of pipeline ranks (pp) x expert ranks (ep); each expert rank also has its part of the batch."""
    group, place, places = mesh["ep"].get_group(), mesh["ep"].get_local_rank(), mesh["ep"].size()
    wire = Wire(group, latency)
    stages = make_stages(drop)
    for layer in (layer for stage in stages for layer in stage.modules() if isinstance(layer, Layer)):
        layer.spread(wire, place)
    pipe = penstock.Pipeline(
        stages, microbatches=6, schedule=schedule, loss_fn=F.mse_loss, recompute=recompute, seed=0, mesh=mesh["pp"]
    )
    for op in (Op.OVERLAP_F_B, Op.OVERLAP_B_F):
        pipe.register(op, handler)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    with pipe.record() as timeline:
        for step in range(steps):
            x, y = (part.chunk(places)[place] for part in make_batch(step))
            wire.log.clear()
            begin = time.perf_counter()
            try:
                loss = pipe.step(x, target=y).loss
            except penstock.errors.PeerFailure as failure:
                wire.fail(failure)
                raise
            seconds = time.perf_counter() - begin
            dist.all_reduce(loss, group=group)
            for name, weight in pipe.named_parameters():
                if ".experts." not in name:  # the others are on every expert rank, as in data parallelism
                    dist.all_reduce(weight.grad, group=group)
                weight.grad /= places
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item() / places)
    weights = {name: weight.detach().clone() for name, weight in pipe.named_parameters()}
    pipe.close()
    return Trained(losses, weights, list(wire.log), timeline, seconds)


def report(name: str, found: Trained) -> None:
    """One line of what this rank saw."""
    waited = sum(message.arrived - message.awaited for message in found.messages)
    beside = sum(message.overlapped for message in found.messages)
    losses = " ".join(f"{loss:.6f}" for loss in found.losses)
    print(f"{name}: losses {losses}; last step {1000 * found.seconds:.0f} ms on rank 0", end="; ")
    print(f"{len(found.messages)} messages, {beside} beside the other half, {1000 * waited:.0f} ms waited for them")


def main(folder: str | None) -> None:
    """On each of the four processes."""
    from torch.distributed.device_mesh import init_device_mesh

    from penstock.view.gantt import gantt
    from penstock.view.run import Run

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    default = train(mesh, 3, handler=None, latency=0.005)
    overlapped = train(mesh, 3, handler=overlap, latency=0.005)
    alone = train_alone(3)
    assert overlapped.losses == default.losses
    assert all(torch.equal(overlapped.weights[name], weight) for name, weight in default.weights.items())
    torch.testing.assert_close(overlapped.losses, alone.losses)
    torch.testing.assert_close(overlapped.weights, {name: alone.weights[name] for name in overlapped.weights})
    assert any(message.overlapped for message in overlapped.messages)
    if dist.get_rank() == 0:
        print("every all-to-all takes 5 ms or more here, as over a slow network")
        report("default", default)
        report("overlapped", overlapped)
        print("the two are equal bit for bit, and to one process but for rounding\n")
        runs = [Run("default", default.timeline), Run("overlapped", overlapped.timeline)]
        print(gantt(runs, width=110))
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for run in runs:
                run.timeline.save(Path(folder) / f"{run.label}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(*sys.argv[1:2] or [None])
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        sys.exit(subprocess.run([*torchrun, *sys.argv]).returncode)
