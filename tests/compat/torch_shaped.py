"""Programs of the shape of upstream's own, for one rank of two: they only know the names that torch has.

The first rank passes the inputs, the last one the target, as people do there.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from penstock.compat.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleFlexibleInterleaved1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    TensorChunkSpec,
    _ScheduleForwardOnly,
    build_stage,
    pipe_split,
    pipeline,
)
from penstock.compat.pipelining.microbatch import sum_reducer
from penstock.compat.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from penstock.errors import PeerFailure

HIDDEN, BATCH = 8, 16
DEVICE = torch.device("cpu")
F, B = _ComputationType.FORWARD, _ComputationType.FULL_BACKWARD
I, W = _ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT
SEND_F, RECV_F = _ComputationType.SEND_F, _ComputationType.RECV_F
SEND_B, RECV_B = _ComputationType.SEND_B, _ComputationType.RECV_B
TOTAL = nn.MSELoss(reduction="sum")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(self.relu(self.net1(x)))
        return out


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.split_spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, count)}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class WithKeywords(nn.Module):
    """Splits by a mark in its forward; a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.register_buffer("shift", torch.randn(HIDDEN))
        self.lin0, self.lin1 = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.mm(x, self.scale) + y
        kept = self.shift.clone()
        x = self.lin0(torch.relu(x))
        pipe_split()
        x = torch.relu(x) + kept
        out: Tensor = self.lin1(x)
        return out


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        return out


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def data(rows: int = BATCH) -> tuple[Tensor, Tensor]:
    some = torch.Generator().manual_seed(3)
    return torch.randn(rows, HIDDEN, generator=some), torch.randn(rows, HIDDEN, generator=some)


def run(schedule: Any, x: Tensor, target: Tensor, ends: tuple[bool, bool]) -> tuple[Any, list[Any]]:
    """One step as the ranks of torch make it."""
    losses: list[Any] = []
    given = (x,) if ends[0] else ()
    output = schedule.step(*given, target=target, losses=losses) if ends[1] else schedule.step(*given)
    return output, losses


def check(
    schedule: Any, parts: dict[str, nn.Module], whole: nn.Module, ends: tuple[bool, bool], rows: int = BATCH
) -> None:
    """Two steps, each after zero_grad: output, loss and gradients are the whole model's."""
    x, target = data(rows)
    whole.zero_grad()
    expected = whole(x)
    loss = TOTAL(expected, target)
    loss.backward()
    for _ in range(2):
        for part in parts.values():
            part.zero_grad()
        output, losses = run(schedule, x, target, ends)
    if ends[1]:
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(sum(losses), loss.detach())
    else:
        assert output is None
        assert losses == []
    for prefix, part in parts.items():
        named = list(part.named_parameters())
        assert named
        for name, parameter in named:
            reference = whole.get_parameter(f"{prefix}{name}")
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-5, atol=1e-5)


def manual(schedule_class: Any, indices: list[int], count: int, microbatches: int = 4, **options: Any) -> Any:
    """A schedule, and the modules by their prefix, of stages made by hand."""
    whole = made(lambda: Layers(count))
    parts = {f"layers.{index}.": copy.deepcopy(whole.get_submodule(f"layers.{index}")) for index in indices}
    stages = [PipelineStage(part, index, count, DEVICE) for part, index in zip(parts.values(), indices, strict=True)]
    chosen: Any = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
    schedule = schedule_class(chosen, microbatches, loss_fn=TOTAL, scale_grads=False, **options)
    return schedule, parts, whole


def loop(rank: int) -> list[int]:
    return [rank, rank + 2]


def vee(rank: int) -> list[int]:
    return [rank, 3 - rank]


def ends_of(indices: list[int], count: int) -> tuple[bool, bool]:
    return 0 in indices, count - 1 in indices


# -- the programs


def forward_only(rank: int) -> None:
    whole = made(lambda: Layers(2))
    x = data()[0]
    stage = pipeline(whole, mb_args=(x.chunk(4)[0],), split_spec=whole.split_spec).build_stage(rank, DEVICE)
    schedule = _ScheduleForwardOnly(stage, 4)
    reference, here = copy.deepcopy(whole), x.clone()
    for _ in range(5):  # with messages of the program's own in between
        if rank == 0:
            schedule.step(here)
            dist.recv(here, src=1)
        else:
            out = schedule.step()
            dist.send(out, dst=0)
    if rank == 1:
        for _ in range(5):
            x = reference(x)
        torch.testing.assert_close(out, x)


def by_name(rank: int) -> None:
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        whole = made(lambda: Layers(2))
        pipe = pipeline(whole, mb_args=(data()[0].chunk(4)[0],), split_spec=whole.split_spec)
        stage = pipe.build_stage(rank, DEVICE)
        schedule = schedule_class(stage, 4, loss_fn=TOTAL, scale_grads=False)
        assert set(stage.submod.state_dict()) < set(whole.state_dict())
        check(schedule, {"": pipe.get_stage_module(rank)}, copy.deepcopy(whole), (rank == 0, rank == 1))


def by_mark(rank: int) -> None:
    (x, target), y = data(), torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(9))
    whole = made(WithKeywords)
    expected = whole(x, y=y)
    loss = TOTAL(expected, target)
    wanted = dict(zip(dict(whole.named_parameters()), torch.autograd.grad(loss, list(whole.parameters())), strict=True))
    pipe = pipeline(whole, mb_args=(x[:4],), mb_kwargs={"y": y[:4]})
    assert pipe.num_stages == 2
    stage = build_stage(pipe.get_stage_module(rank), rank, pipe.info(), DEVICE)
    schedule = ScheduleGPipe(stage, 4, loss_fn=TOTAL, scale_grads=False)
    losses: list[Any] = []
    output = schedule.step(x, y=y) if rank == 0 else schedule.step(target=target, losses=losses)
    if rank == 1:
        torch.testing.assert_close(output, expected.detach())
        torch.testing.assert_close(sum(losses), loss.detach())
    names = [name for name, _ in stage.submod.named_parameters()]
    assert names
    for name, parameter in stage.submod.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-5)


def by_hand(rank: int) -> None:
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        check(*manual(schedule_class, [rank], 2), (rank == 0, rank == 1))
    for looped in (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble):
        check(*manual(looped, loop(rank), 4, 8), (rank == 0, rank == 1))
    for placed in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        check(*manual(placed, vee(rank), 4, 8), (rank == 0, rank == 0))


class ShapedLikeV(PipelineScheduleMulti):
    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self.pipeline_order = {
            0: [_Action(0, F, 0), None, None, _Action(3, F, 0), _Action(3, B, 0), None, None, _Action(0, B, 0)],
            1: [None, _Action(1, F, 0), _Action(2, F, 0), None, None, _Action(2, B, 0), _Action(1, B, 0), None],
        }
        self._validate_and_set_stage_mapping(self.pipeline_order)  # as torch's classes end


class Unbalanced(PipelineScheduleMulti):
    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        rows = ["0F0 1F0 . . 4F0 4B0 . . 1B0 0B0", ". . 2F0 3F0 . . 3B0 2B0 . ."]
        for rank, row in enumerate(rows):
            self.pipeline_order[rank] = [_Action.from_str(cell.strip(".")) for cell in row.split()]


class WithWeights(PipelineScheduleMulti):
    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        rows = [
            "0F0 0F1 2F0 2F1 . 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1",
            ". 1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
        ]
        self.pipeline_order = {
            rank: [_Action.from_str(cell.strip(".")) for cell in row.split()] for rank, row in enumerate(rows)
        }


class WithTransfers(_PipelineScheduleRuntime):
    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, scale_grads: bool = True) -> None:
        super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        down = [(F, 0), (F, 1), (SEND_F, 0), (SEND_F, 1), (RECV_B, 0), (RECV_B, 1), (B, 0), (B, 1)]
        up = [(RECV_F, 0), (RECV_F, 1), (F, 0), (F, 1), (B, 0), (B, 1), (SEND_B, 0), (SEND_B, 1)]
        self.pipeline_order_with_comms = {
            0: [_Action(0, *each) for each in down],
            1: [_Action(1, *each) for each in up],
        }


def own_orders(rank: int) -> None:
    cases: list[tuple[Any, dict[int, list[int]], int]] = [
        (ShapedLikeV, {0: [0, 3], 1: [1, 2]}, 1),
        (Unbalanced, {0: [0, 1, 4], 1: [2, 3]}, 1),
        (WithWeights, {0: [0, 2], 1: [1, 3]}, 2),
        (WithTransfers, {0: [0], 1: [1]}, 2),
    ]
    for schedule_class, placed, microbatches in cases:
        count = sum(map(len, placed.values()))
        schedule, parts, whole = manual(schedule_class, placed[rank], count, microbatches)
        assert schedule.stage_index_to_group_rank == {stage: rank for rank in placed for stage in placed[rank]}
        check(schedule, parts, whole, ends_of(placed[rank], count))
    for vee_class in (ShapedLikeV, ScheduleZBVZeroBubble):  # of the second, stages said what a loop would have
        schedule, _, _ = manual(vee_class, vee(rank), 4, 1)
        assert [stage.stage_index_to_group_rank for stage in schedule._stages] == [{0: 0, 1: 1, 2: 1, 3: 0}] * 2


def through_files(rank: int) -> None:
    """An order goes through both kinds of files and runs."""
    before, _, _ = manual(ScheduleInterleavedZeroBubble, loop(rank), 4, 4)
    with tempfile.TemporaryDirectory() as folder:
        for format in ("compute_only", "compute_comms"):
            file = str(Path(folder) / format)
            before._dump_csv(file, format=format)
            schedule, parts, whole = manual(_PipelineScheduleRuntime, loop(rank), 4, 4)
            schedule._load_csv(file, format=format)
            assert schedule.pipeline_order_with_comms == before.pipeline_order_with_comms
            check(schedule, parts, whole, (rank == 0, rank == 1))


def custom_functions(rank: int) -> None:
    seen: list[str] = []
    schedule, parts, whole = manual(ScheduleDualPipeV, vee(rank), 4, 6)

    def pair(action: Any, ctx: Any) -> None:
        first, second = action.sub_actions
        seen.append(f"{first.stage_index} {second.stage_index}")
        assert ctx.schedule_ref is schedule
        assert len(ctx.arg_mbs) == len(ctx.kwarg_mbs) == 6
        ctx.fetch(action)
        ctx.compute(first)
        ctx.compute(second)

    def reduce(action: Any, ctx: Any) -> None:
        seen.append(f"reduce {action.stage_index}")

    schedule.register_custom_function(_ComputationType.OVERLAP_F_B, pair)
    schedule.register_custom_function(_ComputationType.REDUCE_GRAD, reduce)
    check(schedule, parts, whole, (rank == 0, rank == 0))
    assert any(not each.startswith("reduce") for each in seen)
    assert sorted(each for each in seen if each.startswith("reduce")) == sorted(f"reduce {s}" for s in vee(rank) * 2)


def weight_functions(rank: int) -> None:
    counts = {"built": 0, "run": 0}

    def builder() -> Callable[[], None]:
        counts["built"] += 1

        def runner() -> None:
            counts["run"] += 1

        return runner

    for schedule_class, indices, each in ((ScheduleGPipe, [rank], 4), (ScheduleInterleavedZeroBubble, loop(rank), 8)):
        counts.update(built=0, run=0)
        count = 2 * len(indices)
        whole = made(lambda count=count: Layers(count))  # type: ignore[misc]
        stages = [
            PipelineStage(whole.get_submodule(f"layers.{index}"), index, count, DEVICE, dw_builder=builder)
            for index in indices
        ]
        schedule: Any = schedule_class(stages[0] if len(stages) == 1 else stages, 4, loss_fn=TOTAL)  # type: ignore[operator]
        run(schedule, *data(), (rank == 0, rank == 1))
        assert counts == {"built": each, "run": each}


def specs(rank: int) -> None:
    """Batches along dimension 1, values that go whole, outputs that are summed."""

    class First(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
            return x + table.sum(), x.sum()

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, total: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, str]:
            return x * self.weight * (1 if mask is None else mask), total, "same"

    x = torch.arange(24.0).view(3, 8)
    stage = PipelineStage(First() if rank == 0 else Last(), rank, 2, DEVICE)
    schedule = ScheduleGPipe(
        stage,
        4,
        args_chunk_spec=(TensorChunkSpec(1), None),
        kwargs_chunk_spec={"mask": TensorChunkSpec(1)},
        output_merge_spec=(TensorChunkSpec(1), sum_reducer, None),
    )
    mask = torch.rand(1, 8, generator=torch.Generator().manual_seed(1))
    for rows in (8, 7):  # the second is ragged
        if rank == 0:
            schedule.step(x[:, :rows], torch.ones(2))
        else:
            out, total, word = schedule.step(mask=mask[:, :rows])
            torch.testing.assert_close(out, (x[:, :rows] + 2) * mask[:, :rows])
            torch.testing.assert_close(total, x[:, :rows].sum())
            assert word == "same"
            assert len(stage.output_chunks) == 4


def keywords_of_other_sizes(rank: int) -> None:
    """torch cuts each value by its own rows: one row for each microbatch beside a batch of more."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            out: Tensor = self.linear(x)
            return out if scale is None else out * scale

    torch.manual_seed(0)
    modules = [Scaled() for _ in range(4)]
    x, target = data()
    scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    stages = [PipelineStage(modules[index], index, 4, DEVICE) for index in loop(rank)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=TOTAL, scale_grads=False)
    if rank == 0:
        schedule.step(x, scale=scale)  # stage 2, on the same rank, takes it too
    else:
        output = schedule.step(target=target)
        each = scale.repeat_interleave(4, 0)
        torch.testing.assert_close(output, modules[3](modules[2](modules[1](modules[0](x, each)), each)).detach())


# -- where torch is wrong


def accumulates(rank: int) -> None:
    """Two steps without zero_grad give twice the gradient; torch divides what was there before again."""
    for scale_grads in (True, False):
        schedule, parts, whole = manual(Schedule1F1B, [rank], 2)
        schedule.scale_grads = scale_grads
        x, target = data()
        (TOTAL(whole(x), target) / (4 if scale_grads else 1)).backward()
        for _ in range(2):
            run(schedule, x, target, (rank == 0, rank == 1))
        if rank == 0:
            schedule.eval(x)
        else:
            schedule.eval(target=target)  # which torch lets divide gradients too
        for prefix, part in parts.items():
            for name, parameter in part.named_parameters():
                wanted = 2 * whole.get_parameter(f"{prefix}{name}").grad  # type: ignore[operator]
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-6)


def ragged(rank: int) -> None:
    """10 rows in 4 microbatches, a mean loss: the gradient is that of the whole batch."""
    whole = made(lambda: Layers(2))
    x, target = data(10)
    loss = nn.functional.mse_loss(whole(x), target)
    loss.backward()
    part = copy.deepcopy(whole.get_submodule(f"layers.{rank}"))
    part.zero_grad()
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, DEVICE), 4, loss_fn=nn.functional.mse_loss)
    output, losses = run(schedule, x, target, (rank == 0, rank == 1))
    if rank == 1:
        assert output.shape == (10, HIDDEN)
        torch.testing.assert_close(sum(w * l for w, l in zip([0.3, 0.3, 0.2, 0.2], losses, strict=True)), loss.detach())
    for name, parameter in part.named_parameters():
        reference = whole.get_parameter(f"layers.{rank}.{name}")
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-5, atol=1e-6)
    shorter = schedule.eval(x[:3]) if rank == 0 else schedule.eval()
    if rank == 1:
        torch.testing.assert_close(shorter, whole(x[:3]).detach())


def buffers(rank: int) -> None:
    """No probing: after one step of 3 microbatches the statistics have seen 3 microbatches, and real ones."""
    torch.manual_seed(0)
    modules = [Normed(), Normed()]
    plain = copy.deepcopy(modules)
    x, target = data(12)
    schedule = ScheduleGPipe(PipelineStage(modules[rank], rank, 2, DEVICE), 3, loss_fn=nn.functional.mse_loss)
    for part in x.chunk(3):
        plain[1](plain[0](part))
    run(schedule, x, target, (rank == 0, rank == 1))
    schedule.eval(x) if rank == 0 else schedule.eval(target=target)
    assert modules[rank].training
    for name, buffer in modules[rank].named_buffers():
        torch.testing.assert_close(buffer, plain[rank].get_buffer(name))


def few_microbatches(rank: int) -> None:
    """Fewer microbatches than ranks, and numbers that divide nothing."""
    for schedule_class, indices, last in (
        (Schedule1F1B, [rank], 1),
        (ScheduleInterleaved1F1B, loop(rank), 1),
        (ScheduleFlexibleInterleaved1F1B, loop(rank), 1),
        (ScheduleLoopedBFS, loop(rank), 1),
        (ScheduleZBVZeroBubble, vee(rank), 0),
        (ScheduleDualPipeV, vee(rank), 0),
    ):
        for microbatches in (1, 3, 5):
            count = 2 * len(indices)
            check(*manual(schedule_class, indices, count, microbatches), (rank == 0, rank == last), rows=11)


def evaluates(rank: int) -> None:
    """`eval` on V schedules, without a target, and with a dict for an output."""
    schedule, _, whole = manual(ScheduleZBVZeroBubble, vee(rank), 4)
    x, target = data()
    losses: list[Any] = []
    if rank == 0:
        torch.testing.assert_close(schedule.eval(x), whole(x).detach())
        schedule.eval(x, target=target, losses=losses)
        torch.testing.assert_close(sum(losses), TOTAL(whole(x), target).detach())
    else:
        schedule.eval()
        schedule.eval()

    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"logits": x * 2, "hidden": [x]}

    named = ScheduleGPipe(PipelineStage(nn.Identity() if rank == 0 else Named(), rank, 2, DEVICE), 4)
    out = named.step(x) if rank == 0 else named.step()
    if rank == 1:
        torch.testing.assert_close(out["logits"], x * 2)
        torch.testing.assert_close(out["hidden"][0], x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, HIDDEN), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def shares_weights(rank: int) -> None:
    """A weight on two stages of a Pipe stays one weight, where torch makes two copies of it that drift apart."""
    ids = torch.arange(8) % 9
    plain, whole = made(Tied), made(Tied)
    for _ in range(3):
        loss = nn.functional.cross_entropy(plain(ids), ids)
        for parameter, gradient in zip(
            plain.parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True
        ):
            parameter.data -= 0.5 * gradient
    pipe = pipeline(whole, (ids[:2],), split_spec={"layers.1": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, DEVICE)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.5)
    for _ in range(3):
        schedule.step(ids) if rank == 0 else schedule.step(target=ids)
        optimizer.step()
        optimizer.zero_grad()
    name = "embed.weight" if rank == 0 else "head.weight"
    torch.testing.assert_close(stage.submod.get_parameter(name), plain.get_parameter("embed.weight"))


def wrapped_pipe(rank: int) -> None:
    """torch's way to add data parallelism to a Pipe: its stages' modules in DDP, before `build_stage`."""
    replica = [dist.new_group([each]) for each in range(2)][rank]
    whole, plain = made(lambda: Layers(2)), made(lambda: Layers(2))
    pipe = pipeline(whole, (data()[0][:4],), split_spec=whole.split_spec)  # type: ignore[arg-type]
    module = nn.parallel.DistributedDataParallel(pipe.get_stage_module(rank), process_group=replica)
    seen: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        seen.append(1)
        return allreduce_hook(state, bucket)

    module.register_comm_hook(replica, hook)
    schedule = Schedule1F1B(build_stage(module, rank, pipe.info(), DEVICE), 4, loss_fn=TOTAL, scale_grads=False)
    x, target = data()
    TOTAL(plain(x), target).backward()
    for _ in range(2):
        module.zero_grad()
        run(schedule, x, target, (rank == 0, rank == 1))
    assert seen == [1, 1]  # one bucket, once per step
    for name, parameter in module.module.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"something else than pipe.get_stage_module\(0\) gave"):
        build_stage(nn.Linear(2, 2), 0, pipe.info(), DEVICE)


def deferred_receives(rank: int) -> None:
    """torch's defer_pp_recv=True pairs messages with the wrong receives; here it changes nothing."""
    for schedule_class, indices, last in (
        (ScheduleZBVZeroBubble, vee(rank), 0),
        (ScheduleInterleavedZeroBubble, loop(rank), 1),
    ):
        made_so = manual(schedule_class, indices, 4, 3, defer_pp_recv=True, backward_requires_autograd=True)
        check(*made_so, (rank == 0, rank == last), rows=6)


class Fused(nn.Module):
    """One parameter that its state lists as two, as fused attention layers do, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.randn(2, HIDDEN))
        self.register_buffer("cache", torch.ones(HIDDEN), persistent=False)
        self.register_state_dict_post_hook(self._parted)

    @staticmethod
    def _parted(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}one"], state[f"{prefix}two"] = state.pop(f"{prefix}both").unbind()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.both[0] + self.both[1] * self.cache


def states_that_list_other_names(rank: int) -> None:
    """Ranks told each other what the state lists, and took the parameters of others for something else."""
    modules = [made(Fused), made(Fused)]
    x, target = data()
    TOTAL(modules[1](modules[0](x)), target).backward()
    part = copy.deepcopy(modules[rank])
    part.zero_grad()
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, DEVICE), 4, loss_fn=TOTAL, scale_grads=False)
    run(schedule, x, target, (rank == 0, rank == 1))
    torch.testing.assert_close(part.both.grad, modules[rank].both.grad)


class Fails(nn.Module):
    broken = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise ValueError("no such luck")
        out: Tensor = self.linear(x)
        return out


def fails_and_goes_on(rank: int) -> None:
    """A rank that fails is named on all ranks at once, and the next step is a step."""
    module = nn.Linear(HIDDEN, HIDDEN) if rank == 0 else Fails()
    schedule = Schedule1F1B(PipelineStage(module, rank, 2, DEVICE), 4, loss_fn=TOTAL)
    with pytest.raises(PeerFailure, match="no such luck") as caught:
        run(schedule, *data(), (rank == 0, rank == 1))
    assert (caught.value.rank, caught.value.stage, caught.value.action) == (1, 1, "1F0")
    module.broken = False  # type: ignore[assignment]
    output, losses = run(schedule, *data(), (rank == 0, rank == 1))
    assert (output is None, len(losses)) == ((True, 0) if rank == 0 else (False, 4))


def refused(rank: int) -> list[str]:
    """What goes wrong on one rank is an error on all, and never a hang."""

    def attempt(function: Callable[[], Any]) -> str:
        try:
            function()
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    x, target = data()
    found = []
    stage = PipelineStage(Layer(), 0, 2, DEVICE)  # both ranks say that they are stage 0
    found.append(attempt(lambda: ScheduleGPipe(stage, 2, loss_fn=TOTAL).step(x, target=target)))
    schedule, _, _ = manual(ScheduleZBVZeroBubble, loop(rank), 4)  # placed as a loop
    found.append(attempt(lambda: schedule.step(x, target=target)))
    schedule, _, _ = manual(Schedule1F1B, [rank], 2, 8)
    found.append(attempt(lambda: run(schedule, x[:3], target[:3], (rank == 0, rank == 1))))  # too few rows
    with torch.no_grad():
        found.append(attempt(lambda: run(schedule, x, target, (rank == 0, rank == 1))))
    found.append(attempt(lambda: schedule.step(x, target=target, losses=())))
    check(*manual(Schedule1F1B, [rank], 2, 8), (rank == 0, rank == 1))
    some = ScheduleGPipe(PipelineStage(Layer(), rank, 2, DEVICE), 2, loss_fn=TOTAL if rank == 1 else None)
    found.append(attempt(lambda: some.step(x) if rank == 0 else some.step(target=target)))  # a loss on one rank only
    wrapped = nn.parallel.DistributedDataParallel(Layer())
    schedule = Schedule1F1B(PipelineStage(wrapped, rank, 2, DEVICE), 2, loss_fn=TOTAL)
    found.append(attempt(lambda: run(schedule, x, target, (rank == 0, rank == 1))))  # over other stages' ranks
    return [*found, *refused_by_one(rank, attempt)]


def refused_by_one(rank: int, attempt: Callable[[Callable[[], Any]], str]) -> list[str]:
    """What only one rank can see before its step; the other one waited for it until the group's timeout."""
    x, target = data()
    specs = (TensorChunkSpec(0), None)
    schedule, parts, whole = manual(Schedule1F1B, [rank], 2)
    other, _, _ = manual(Schedule1F1B, [rank], 2, args_chunk_spec=specs)
    infers = _ScheduleForwardOnly(PipelineStage(Layer(), rank, 2, DEVICE), 4)
    first: tuple[Callable[[], Any], ...] = (
        lambda: schedule.step(x),
        lambda: other.step(x),
        lambda: infers.step(x),
        lambda: schedule.step(x, unknown=3),
        lambda: schedule._step_microbatches([(x,)] * 3),
    )
    last: tuple[Callable[[], Any], ...] = (
        lambda: schedule.step(target=target, losses=()),
        lambda: other.step(target=target),
        lambda: infers.step(target=target),
        lambda: schedule.step(target=target),
        lambda: schedule.step(target=target),
    )
    found = [attempt(call) for call in (last if rank else first)]
    check(schedule, parts, whole, (rank == 0, rank == 1))  # none of it has harmed the schedule
    if rank == 1:
        schedule._stage.submod = Layer()
    found.append(attempt(lambda: run(schedule, x, target, (rank == 0, rank == 1))))
    return found


PROGRAMS = [
    forward_only, by_name, by_mark, by_hand, own_orders, through_files, custom_functions, weight_functions, specs,
    keywords_of_other_sizes,
    accumulates, ragged, buffers, evaluates, shares_weights, wrapped_pipe, deferred_receives, fails_and_goes_on,
    few_microbatches, states_that_list_other_names,
]  # fmt: skip


def on_a_rank() -> dict[str, Any]:
    """All programs, in one group: the first that fails ends it, with its traceback."""
    rank = dist.get_rank()
    for program in PROGRAMS:
        program(rank)
        dist.barrier()
    return {"refused": refused(rank), "ran": [program.__name__ for program in PROGRAMS]}
