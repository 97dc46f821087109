"""What replicas promise beside exact gradients: one reduction, right weights, right norms, one failure for all.

One group of four processes, two replicas of a pipeline of two ranks, runs all scenarios, and another those of the slow
tests; each returns what its process saw, and the tests look at that.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import SOON, TIMEOUT
from exactness.models import example
from parallel.cases import Case, plain_step, same, tie, untied, whole_of
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import penstock
from penstock import LossOptions, ParallelOptions
from penstock.errors import PenstockError
from penstock.schedule import Op, build, lower

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


# --- the scenarios, each on every process


def reductions(mesh: Any) -> Any:
    """What is reduced in a step, counted where torch does it."""
    counted: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def counts(*args: Any, **kwargs: Any) -> Any:
            counted[name] += max(each.numel() for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            return function(*args, **kwargs)

        return counts

    found = {}
    names = ("all_reduce", "reduce_scatter_single")
    kept = {name: getattr(dist, name) for name in names}
    x, y = own(mesh, *batch())
    for kind in KINDS:
        for family in ("zb-v", "looped-bfs", "dualpipe-v", "zb-h1", "1f1b"):
            modules = stages(2 if family in ("zb-h1", "1f1b") else 4)
            modules[-1].linear.weight = modules[0].linear.weight  # tied: on zb-v between two stages of one rank
            with pipeline(mesh, modules, schedule=family, parallel_options=ParallelOptions(replicate=kind)) as pipe:
                pipe.step(x, target=y)
                counted.clear()
                for name in names:
                    setattr(dist, name, counting(name, kept[name]))
                try:
                    pipe.step(x, target=y)
                finally:
                    for name in names:
                        setattr(dist, name, kept[name])
                size = sum(parameter.numel() for parameter in pipe.parameters())
                found[kind, family] = (dict(counted), size)
    return found


def clipping(mesh: Any) -> Any:
    found = {}
    for kind in KINDS:
        for norm_type in (2.0, float("inf"), 1.0):
            made = example("transformer", 4, ROWS, torch.float64)
            tie(made.stages)
            ids, target = own(mesh, made.args[0], made.target)
            with pipeline(
                mesh, made.stages, loss_fn=made.loss_fn, parallel_options=ParallelOptions(replicate=kind), seed=11
            ) as pipe:
                pipe.step(ids, target=target)
                norm = pipe.clip_grad_norm_(0.01, norm_type)
                found[kind, norm_type] = (norm, gradients(pipe))
    return found


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over rows that count."""
    counted = target[:, 0] != -100
    return F.mse_loss(output[counted], target[counted])


def weights(mesh: Any) -> Any:
    """Tokens, not rows: of the second replica's target only one row counts, or none."""
    found = {}
    x, y = batch()
    for counting in (1, 0):
        target = y.clone()
        target[ROWS // 2 + counting :] = -100
        mine, wanted = own(mesh, x, target)
        for kind in KINDS:
            with pipeline(
                mesh,
                loss_fn=token_loss,
                loss_options=LossOptions(weight=lambda target: (target[:, 0] != -100).sum()),
                parallel_options=ParallelOptions(replicate=kind),
            ) as pipe:
                result = pipe.step(mine, target=wanted)
                found[kind, counting] = (result.loss, gradients(pipe))
    return found


class Balanced(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        penstock.add_loss("balance", out.pow(2).mean())
        return out


def extra_losses(mesh: Any) -> Any:
    found = {}
    x, y = own(mesh, *batch())
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        with pipeline(
            mesh,
            [Balanced(WIDTH, WIDTH), Balanced(WIDTH, WIDTH)],
            schedule="1f1b",
            loss_options=LossOptions(reduction=reduction),
            parallel_options=ParallelOptions(replicate="ddp"),
            loss_fn=functools.partial(F.mse_loss, reduction=reduction),
        ) as pipe:
            result = pipe.step(x, target=y)
            found[reduction] = (result.loss, dict(result.extra_losses), gradients(pipe))
    return found


def evaluations(mesh: Any) -> Any:
    """Of unequal size, and fewer rows than microbatches on one replica."""
    x, y = batch()
    found = {}
    for kind in KINDS:
        with pipeline(
            mesh, parallel_options=ParallelOptions(replicate=kind, window=1 if kind == "fsdp" else None)
        ) as pipe:
            pipe.step(*own(mesh, x), target=own(mesh, y)[0])
            before = gradients(pipe)
            mine, target = own(mesh, x, y, rows=(7, 2))
            result = pipe.evaluate(mine, target=target)
            output = pipe.predict(mine)
            after = gradients(pipe)
            pipe.step(*own(mesh, x), target=own(mesh, y)[0])
            kept = all(torch.equal(before[name], after[name]) for name in before)
            found[kind] = (result.loss, output, kept, before, gradients(pipe))
    return found


def failures(mesh: Any) -> Any:
    """One rank of one replica raises, in the forward of any of its stages; then a step that must be exact."""
    x, y = own(mesh, *batch())
    found = []
    for kind in KINDS:
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            wanted = gradients(pipe)
            pipe.zero_grad()
            for stage, replica in ((0, 0), (2, 1), (3, 1)):
                if stage in pipe.deployment.ranks.modules() and mesh.get_local_rank("dp") == replica:
                    pipe.deployment.ranks.modules()[stage].traps = iter([boom])
                said = attempt(pipe.step, x, target=y)
                clean = all(parameter.grad is None for parameter in pipe.parameters())
                pipe.step(x, target=y)
                exact = all(torch.equal(wanted[name], value) for name, value in gradients(pipe).items())
                pipe.zero_grad()
                found.append((kind, stage, replica, said, clean, exact))
            # a batch that is refused on one replica only
            short = x[:2] if mesh.get_local_rank("dp") == 1 else x
            said = attempt(pipe.step, short, target=y)
            pipe.step(x, target=y)
            exact = all(torch.equal(wanted[name], value) for name, value in gradients(pipe).items())
            found.append((kind, "batch", 1, said, True, exact))
            said = attempt(pipe.evaluate, x, colour=y) if mesh.get_local_rank("dp") else attempt(pipe.evaluate, x)
            pipe.zero_grad()
            pipe.step(x, target=y)
            exact = all(torch.equal(wanted[name], value) for name, value in gradients(pipe).items())
            found.append((kind, "evaluate", 1, said, True, exact))
    return found


def a_failed_step_keeps_what_was_added_before(mesh: Any) -> Any:
    x, y = own(mesh, *batch())
    found = []
    for kind in KINDS:
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            before = gradients(pipe)
            if 3 in pipe.deployment.ranks.modules() and mesh.get_local_rank("dp") == 1:
                pipe.deployment.ranks.modules()[3].traps = iter([boom])
            said = attempt(pipe.step, x, target=y)
            found.append((said[0], all(torch.equal(before[name], value) for name, value in gradients(pipe).items())))
            if 3 in pipe.deployment.ranks.modules() and mesh.get_local_rank("dp") == 0:
                pipe.deployment.ranks.modules()[3].traps = iter([boom])
            said = attempt(pipe.evaluate, x, target=y)
            found.append((said[0], all(torch.equal(before[name], value) for name, value in gradients(pipe).items())))
    return found


def refused(mesh: Any) -> Any:
    """Replicas that were given different pipelines, and what cannot be."""
    second = mesh.get_local_rank("dp") == 1
    sparse = [nn.Sequential(nn.Embedding(5, WIDTH, sparse=True)), Layer()]
    mixed = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double()), Layer()]
    ids = torch.arange(4)
    tied = stages(2)
    tied[1].linear.weight = tied[0].linear.weight
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    turned = stages(2)
    turned[1].linear.weight.data = turned[1].linear.weight.data.t().contiguous().t()
    found = [
        attempt(pipeline, mesh, microbatches=M + second, parallel_options=ParallelOptions(replicate="ddp")),
        attempt(pipeline, mesh, parallel_options=ParallelOptions(replicate="fsdp" if second else "ddp")),
        attempt(pipeline, mesh, mixed, schedule="1f1b", parallel_options=ParallelOptions(replicate="fsdp")),
        attempt(
            pipeline,
            mesh,
            tied,
            schedule="1f1b",
            parallel_options=ParallelOptions(replicate="fsdp", shard_precision=policy),
        ),
        attempt(pipeline, mesh, turned, schedule="1f1b", parallel_options=ParallelOptions(replicate="fsdp")),
        attempt(penstock.mesh, 3, 2),
        attempt(penstock.mesh, 3, -1),
    ]
    with pipeline(mesh, sparse, schedule="1f1b", parallel_options=ParallelOptions(replicate="ddp")) as pipe:
        found.append(attempt(pipe.step, ids, target=torch.zeros(4, WIDTH)))
    return found


def low_precision(mesh: Any) -> Any:
    x, y = own(mesh, *batch())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    found = {}
    for family in ("1f1b", "zb-v"):
        with pipeline(
            mesh,
            stages(2 if family == "1f1b" else 4),
            schedule=family,
            parallel_options=ParallelOptions(replicate="fsdp", shard_precision=policy),
        ) as pipe:
            result = pipe.step(x, target=y)
            dtypes = {parameter.dtype for parameter in pipe.parameters()} | {result.loss.dtype}
            found[family] = (result.loss, gradients(pipe), dtypes)
    return found


def names_and_state(mesh: Any) -> Any:
    """Saved and loaded under the model's own names, whole or sharded."""
    whole = {name: value + 1 for name, value in nn.ModuleList(stages()).state_dict().items()}
    found = {}
    for kind in KINDS:
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            names = sorted(pipe.state_dict())
            pipe.load_state_dict(whole)
            taken = all(torch.equal(whole_of(value), whole[name]) for name, value in pipe.state_dict().items())
            again = {name: whole_of(value) for name, value in pipe.state_dict().items()}
            local = sum(getattr(value, "_local_tensor", value).numel() for value in pipe.state_dict().values())
            found[kind] = (names, taken, set(again) == set(names), local)
    return found


def own_meshes(mesh: Any) -> Any:
    """DeviceMeshes that the user made: other orders of axes, a part of a larger one, none that is the pipeline's."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    x, y = batch()
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    strange = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "experts"))
    nameless = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    crossed = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("dp", "pp"))
    found = [attempt(pipeline, given, schedule="1f1b", modules=stages(2)) for given in (strange, nameless, crossed)]
    found.append(
        attempt(
            pipeline,
            strange["pp"],
            schedule="1f1b",
            modules=stages(2),
            parallel_options=ParallelOptions(replicate="ddp"),
        )
    )
    with pipeline(turned) as pipe:  # with a dp axis, replicas are the default
        result = pipe.step(*own(turned, x), target=own(turned, y)[0])
        words = pipe.describe()
        return found, result.loss, gradients(pipe), pipe.composition.replicate, words


def schedules_with_transfers(mesh: Any) -> Any:
    """A program from a file has its transfers already, and no reductions."""
    x, y = own(mesh, *batch())
    program = lower(build("zb-v", 2, M, 2))
    found = {}
    for kind in KINDS:
        with pipeline(
            mesh, schedule=program, microbatches=None, parallel_options=ParallelOptions(replicate=kind)
        ) as pipe:
            found[kind] = (pipe.step(x, target=y).loss, gradients(pipe))
    return found


def windows(mesh: Any) -> Any:
    """How many stages of a rank are whole at each action, by what FSDP itself says."""
    x, y = own(mesh, *batch())
    found = {}
    for window in (1, 2):
        with pipeline(
            mesh,
            stages(6),
            schedule=build("interleaved-1f1b", 2, M, 3),
            microbatches=None,
            parallel_options=ParallelOptions(replicate="fsdp", window=window),
        ) as pipe:
            (executor,) = pipe.deployment.ranks.executors.values()
            groups = [
                module._get_fsdp_state()._fsdp_param_groups[0] for module in pipe.deployment.ranks.modules().values()
            ]
            most, between = 0, 0

            def count(action: Any, context: Any, groups: Any = groups) -> None:
                nonlocal most
                context.run(action)
                most = max(most, sum(group.is_unsharded for group in groups))

            for op in (Op.F, Op.B):
                pipe.register(op, count)
            pipe.step(x, target=y)
            between = sum(group.is_unsharded for group in groups)
            actions = Counter(action.op.name for action in pipe.program.rank(executor.rank) if action is not None)
            pipe.evaluate(x, target=y)
            found[window] = (most, between, dict(actions), sum(group.is_unsharded for group in groups))
    return found


def loss_scaling(mesh: Any) -> Any:
    """An overflow in one number of one rank of one replica: no process may step."""
    x, y = own(mesh, *batch())
    found = {}
    for kind in KINDS:
        modules = stages()
        modules[-1].linear.weight = modules[0].linear.weight  # stays whole, beside sharded ones
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            scaler = penstock.GradScaler(pipe, init_scale=4.0)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            steps = []
            for bad in (False, True, False):
                before = [whole_of(parameter).clone() for parameter in pipe.parameters()]
                optimizer.zero_grad()
                pipe.step(x, target=y)
                if bad and dist.get_rank() == 3 and kind == "fsdp":
                    next(pipe.parameters()).grad._local_tensor[0] = float("inf")
                if bad and kind == "ddp" and mesh.get_local_rank("pp") == 1:
                    next(pipe.parameters()).grad[0] = float("inf")
                scaler.unscale_(optimizer)
                norm = pipe.clip_grad_norm_(100.0)
                scaler.step(optimizer)
                scaler.update()
                after = [whole_of(parameter) for parameter in pipe.parameters()]
                moved = any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
                steps.append((moved, scaler.get_scale(), norm.item()))
            found[kind] = steps
    return found


def frozen_at_first(mesh: Any) -> Any:
    """Parameters that were frozen when the pipeline was made, and are trained from the second step on."""
    x, y = own(mesh, *batch())
    found = {}
    for kind in KINDS:
        modules = stages()
        for module in modules:
            module.linear.weight.requires_grad_(False)
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            kept = [name for name, value in gradients(pipe).items() if value is None]
            pipe.zero_grad()
            for parameter in pipe.parameters():
                parameter.requires_grad_(True)
            result = pipe.step(x, target=y)
            found[kind] = (kept, result.loss, gradients(pipe), pipe.grad_norm())
    return found


def train_with(pipe: penstock.Pipeline, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    pipe.step(x, target=y)
    optimizer.step()


def made_and_closed(*args: Any, **options: Any) -> None:
    pipeline(*args, **options).close()


def unscale(pipe: penstock.Pipeline, x: Tensor, y: Tensor, scale: float) -> None:
    scaler = penstock.GradScaler(pipe, init_scale=scale)
    pipe.step(x, target=y)
    scaler.unscale_(torch.optim.SGD(pipe.parameters(), lr=0.1))


def set_apart(mesh: Any) -> Any:
    """What a loop can do to set the copies of a stage apart, without any shape that does not fit."""
    x, y = own(mesh, *batch())
    second = mesh.get_local_rank("dp") == 1
    found: dict[str, Any] = {"optimizers": []}
    for kind in KINDS:
        modules = stages()
        before = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            found["optimizers"].append(attempt(train_with, pipe, x, y, before))
            pipe.zero_grad()
            for name, parameter in pipe.named_parameters():  # as many on both replicas, and not the same
                parameter.requires_grad_(name.endswith("bias" if second else "weight"))
            found[f"trained {kind}"] = attempt(pipe.step, x, target=y)
            for parameter in pipe.parameters():
                parameter.requires_grad_(True)
            found[f"scales {kind}"] = attempt(unscale, pipe, x, y, 8.0 if second else 4.0)
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            for module in pipe.deployment.ranks.modules().values():
                module.linear = nn.Linear(WIDTH, WIDTH)
            found[f"exchanged {kind}"] = attempt(pipe.step, x, target=y)
        modules = stages()
        with pipeline(mesh, modules, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            pipe.step(x, target=y)
            pipe.zero_grad()
            if not second:  # as in `if rank == 0: load`
                pipe.load_state_dict({name: value + 1 for name, value in nn.ModuleList(stages()).state_dict().items()})
            found[f"loaded {kind}"] = attempt(pipe.step, x, target=y)
        found[f"elsewhere {kind}"] = attempt(
            made_and_closed, mesh, [each.linear for each in modules], parallel_options=ParallelOptions(replicate=kind)
        )
        modules = stages()
        made_and_closed(mesh, modules, parallel_options=ParallelOptions(replicate=kind))
        found[f"again {kind}"] = attempt(
            made_and_closed, mesh, [each.linear for each in modules], parallel_options=ParallelOptions(replicate=kind)
        )
        with pipeline(mesh, parallel_options=ParallelOptions(replicate=kind)) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
            pipe.step(x, target=y)
            if second or kind == "fsdp":  # a shard is nobody else's: there is nothing to differ from
                optimizer.step()
            found[f"stepped {kind}"] = attempt(pipe.step, x, target=y)
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.mul_(1.5 if second else 1)
            found[f"scaled {kind}"] = attempt(pipe.step, x, target=y)
            for parameter in pipe.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)
            found[f"hooked {kind}"] = attempt(pipe.step, x, target=y)
        with pipeline(mesh, stages(2), schedule="1f1b", parallel_options=ParallelOptions(replicate=kind)) as pipe:
            other = y + mesh.get_local_rank("pp")  # rows by the number in the world: each rank has its own
            found[f"targets {kind}"] = attempt(pipe.step, x, target=other)
            found[f"then {kind}"] = all(parameter.grad is None for parameter in pipe.parameters())
    return found


def one_replica_in_low_precision(mesh: Any) -> Any:
    """A mesh with a single replica: nothing to shard, but the policy counts."""
    from torch.distributed.device_mesh import init_device_mesh

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "dp"))
    x, y = batch()
    computed = []
    with pipeline(
        alone,
        schedule="1f1b",
        parallel_options=ParallelOptions(replicate="fsdp", shard_precision=policy),
    ) as pipe:
        for module in pipe.deployment.ranks.modules().values():
            module.linear.register_forward_hook(lambda module, args, output: computed.append(output.dtype))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            losses.append(pipe.step(x, target=y).loss)
            dtypes = {parameter.grad.dtype for parameter in pipe.parameters()}
            optimizer.step()
            optimizer.zero_grad()
    return set(computed), dtypes, losses


class Slow(nn.Module):
    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.linear, self.slow = nn.Linear(WIDTH, WIDTH), slow

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004 if self.slow else 0)
        out: Tensor = self.linear(x)
        return out


class Uneven(nn.Module):
    """Each replica finds another part of it slow: the first one its beginning."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Slow((number < 3) == (replica == 0)) for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def measured(mesh: Any) -> list[int]:
    """How many layers each stage has where times say so."""
    torch.manual_seed(0)
    x, y = batch()
    with penstock.Pipeline(
        Uneven(mesh.get_local_rank("dp")),
        stages=2,
        microbatches=2,
        balance="time",
        example=(x[:2],),
        loss_fn=F.mse_loss,
        mesh=mesh,
        timeout=TIMEOUT,
    ) as pipe:
        pipe.step(x, target=y)
        return [len(part.units) for part in pipe.deployment.staged.parts]


SCENARIOS = [
    reductions,
    clipping,
    weights,
    failures,
    a_failed_step_keeps_what_was_added_before,
    names_and_state,
]
OTHERS = [
    extra_losses,
    evaluations,
    loss_scaling,
    measured,
    frozen_at_first,
    set_apart,
    one_replica_in_low_precision,
    own_meshes,
    schedules_with_transfers,
    windows,
    refused,
    low_precision,
]


def all_scenarios() -> dict[str, Any]:
    mesh = penstock.mesh(pp=2, dp=-1)
    return {scenario.__name__: scenario(mesh) for scenario in SCENARIOS}


def all_others() -> dict[str, Any]:
    mesh = penstock.mesh(pp=2, dp=-1)
    return {scenario.__name__: scenario(mesh) for scenario in OTHERS}


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each process saw: replica 0 and 1 of rank 0, then of rank 1."""
    return on_processes(4, all_scenarios)


@pytest.fixture(scope="module")
def told_others() -> list[dict[str, Any]]:
    """The same, of the scenarios that the slow tests look at."""
    return on_processes(4, all_others)


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


@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_is_reduced_exactly_once_a_step_under_every_kind_of_schedule(told: Any, kind: str) -> None:
    for rank in told:
        for (which, family), (counted, size) in rank["reductions"].items():
            if which == kind:
                whole = counted.get("all_reduce", 0)
                sharded = counted.get("reduce_scatter_single", 0)
                assert whole + sharded == size, (family, counted)
                assert (sharded > 0) == (kind == "fsdp"), (family, counted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_norms_count_sharded_tied_and_replicated_gradients_once(told: Any, kind: str, norm_type: float) -> None:
    case = Case("zb-v", "ddp", "tied", rows=(ROWS // 2, ROWS // 2))
    made = case.made()
    for module in made.stages:
        module.double()
    made.args = (made.args[0],)
    whole = nn.ModuleList(made.stages)
    plain_step(made, case, 0, list(whole.parameters()))
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
    norms = [rank["clipping"][kind, norm_type][0] for rank in told]
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    torch.testing.assert_close(norms[0], wanted, rtol=1e-10, atol=0)
    found = by_name(told, lambda rank: rank["clipping"][kind, norm_type][1])
    found = {untied(name, case): value for name, value in found.items()}
    close(found, {name: parameter.grad for name, parameter in whole.named_parameters()}, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counting", [1, 0])
def test_replicas_weigh_by_tokens_and_one_without_any_adds_nothing(told: Any, kind: str, counting: int) -> None:
    x, y = batch()
    y[ROWS // 2 + counting :] = -100
    tokens = [(goal[:, 0] != -100).sum().item() for half in (0, 1) for _, goal in cut(x, y, half)]
    loss, wanted = plain(stages(), x, y, token_loss, [count / sum(tokens) for count in tokens])
    for rank in told:
        torch.testing.assert_close(rank["weights"][kind, counting][0], loss)
    close(by_name(told, lambda rank: rank["weights"][kind, counting][1]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_named_losses_are_means_over_the_microbatches_of_all_replicas(told_others: Any, reduction: str) -> None:
    x, y = batch()
    torch.manual_seed(0)
    modules = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    shares = ROW_SHARES if reduction == "mean" else [1.0] * 2 * M
    total, balance = torch.zeros(()), 0.0
    for (part, goal), share in zip([*cut(x, y, 0), *cut(x, y, 1)], shares, strict=True):
        first = modules[0](part)
        second = modules[1](first)
        extra = (first.pow(2).mean() + second.pow(2).mean()) / (2 * M)
        loss = F.mse_loss(second, goal, reduction=reduction) * share
        (loss + extra).backward()
        total, balance = total + loss.detach(), balance + extra.item()
    for rank in told_others:
        loss, extra, _ = rank["extra_losses"][reduction]
        torch.testing.assert_close(loss, total)
        assert extra == {"balance": pytest.approx(balance, rel=1e-6)}
    found = by_name(told_others, lambda rank: rank["extra_losses"][reduction][2])
    close(found, {name: p.grad for name, p in nn.ModuleList(modules).named_parameters()}, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluations_of_unequal_size_between_steps_lose_nothing(told_others: Any, kind: str) -> None:
    x, y = batch()
    out = x[:9]
    for module in stages():
        out = module(out)
    for rank in told_others:
        loss, _, kept, before, after = rank["evaluations"][kind]
        torch.testing.assert_close(loss, F.mse_loss(out, y[:9]).detach())
        assert kept
        assert all(torch.equal(value * 2, after[name]) for name, value in before.items())
    outputs = [rank["evaluations"][kind][1] for rank in told_others]  # of a V, the last stage is on the first rank
    torch.testing.assert_close(torch.cat(outputs[:2]), out.detach())
    assert outputs[2:] == [None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_in_one_replica_is_named_by_all_at_once_and_the_next_step_is_exact(told: Any, kind: str) -> None:
    ranks = {0: 0, 2: 1, 3: 0}
    for rank in told:
        cases = [case for case in rank["failures"] if case[0] == kind]
        assert len(cases) == 5
        for _, stage, replica, (name, text, named, seconds), clean, exact in cases[:3]:
            assert (name, named, clean, exact) == ("PeerFailure", replica, True, True)
            assert f"rank {ranks[stage]} of replica {replica} failed (stage {stage}, action {stage}F0" in text
            assert "ValueError: boom" in text
            assert seconds < SOON
        for _, _, _, (name, text, _, seconds), _, exact in cases[3:]:
            assert name in ("ModelError", "PeerFailure")
            assert "argument 0 has 2 rows" in text or "'target' has 6 rows" in text or "'colour'" in text
            assert exact
            assert seconds < SOON


@pytest.mark.slow
def test_meshes_of_the_users_own(told_others: Any) -> None:
    loss, wanted = plain(stages(), *batch(), F.mse_loss, ROW_SHARES)
    for rank in told_others:
        (strange, nameless, crossed, part), found, _, kind, words = rank["own_meshes"]
        assert (strange[0], nameless[0], crossed[0], part[0]) == ("UsageError",) * 4
        assert "along the mesh's axis 'dp' the processes do not stand in the order of their numbers" in crossed[1]
        assert "axes ('pp', 'experts'), and a pipeline knows ('pp', 'dp', 'tp')" in strange[1]
        assert "axes ('a', 'b'); name the pipeline's axis 'pp'" in nameless[1]
        assert "add an axis 'dp'" in part[1]
        torch.testing.assert_close(found, loss)
        assert kind == "ddp"
        assert "beside    2 replicas, each with all parameters of its stages" in words
    close(by_name(told_others, lambda rank: rank["own_meshes"][2]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_without_reductions_gets_them(told_others: Any, kind: str) -> None:
    loss, wanted = plain(stages(), *batch(), F.mse_loss, ROW_SHARES)
    torch.testing.assert_close(told_others[0]["schedules_with_transfers"][kind][0], loss)
    close(by_name(told_others, lambda rank: rank["schedules_with_transfers"][kind][1]), wanted)


@pytest.mark.slow
def test_no_more_stages_are_whole_than_the_window_says_and_none_between_steps(told_others: Any) -> None:
    for rank in told_others:
        for window, (most, between, actions, after) in rank["windows"].items():
            assert (most, between, after) == (window, 0, 0)
            assert actions["UNSHARD"] == actions["RESHARD"] > 3  # freed and gathered again within the step
            assert actions["REDUCE_GRAD"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_anywhere_is_found_by_all_and_nobody_steps(told_others: Any, kind: str) -> None:
    for rank in told_others:
        steps = rank["loss_scaling"][kind]
        assert [(moved, scale) for moved, scale, _ in steps] == [(True, 4.0), (False, 2.0), (True, 2.0)]
        norms = [norm for _, _, norm in steps]
        assert norms == [norm for _, _, norm in told_others[0]["loss_scaling"][kind]] or norms[1] != norms[1]
        assert 0 < norms[0] < 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_frozen_at_first_is_reduced_once_when_it_is_trained_later(told_others: Any, kind: str) -> None:
    loss, wanted = plain(stages(), *batch(), F.mse_loss, ROW_SHARES)
    norm = nn.utils.get_total_norm(list(wanted.values()))
    for rank in told_others:
        kept, found, _, total = rank["frozen_at_first"][kind]
        assert len(kept) == 2
        assert all(name.endswith("weight") for name in kept)
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(total, norm)
    close(by_name(told_others, lambda rank: rank["frozen_at_first"][kind][2]), wanted)


@pytest.mark.slow
def test_an_optimizer_of_all_of_the_models_parameters_is_refused(told_others: Any) -> None:
    for rank in told_others:
        plainly, sharded = rank["set_apart"]["optimizers"]
        assert plainly[0] == "ModelError"
        assert "an optimizer of pipe.parameters()" in plainly[1]
        assert sharded[0] == "UsageError"
        assert "this SGD was made before the Pipeline" in sharded[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_cannot_set_replicas_apart_without_a_word(told_others: Any, kind: str) -> None:
    for rank in told_others:
        said = {name: rank["set_apart"][f"{name} {kind}"] for name in ("trained", "scales", "exchanged", "targets")}
        for name in ("trained", "exchanged"):
            assert said[name][0] in ("UsageError", "PeerFailure")
        assert "the replicas train different parameters of rank" in said["trained"][1]
        assert "(replica 0: 2, replica 1: 2 of 4)" in said["trained"][1]
        assert said["scales"][0] == "UsageError"
        assert "(rank 0: 4 and 8, rank 1: 4 and 8)" in said["scales"][1]
        assert "2 parameters are not those that the pipeline was made with" in said["exchanged"][1] or (
            "4 parameters are not those" in said["exchanged"][1]
        )
        assert said["targets"][0] == "ModelError"
        assert "the ranks were given different batches ('target': rank 0 has" in said["targets"][1]
        assert rank["set_apart"][f"then {kind}"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_drift_apart_are_noticed_in_the_next_step(told_others: Any, kind: str) -> None:
    for rank in told_others:
        names = ("loaded", "stepped", "scaled", "hooked", "again", "elsewhere")
        loaded, stepped, scaled, hooked, again, elsewhere = (rank["set_apart"][f"{name} {kind}"] for name in names)
        assert elsewhere[0] == "ModelError"
        assert "another Pipeline trains Linear" in elsewhere[1]
        assert loaded[0] == "UsageError"
        assert "the replicas have loaded different states, or not all of them have loaded one" in loaded[1]
        if kind == "ddp":
            assert (stepped[0], again[0]) == ("UsageError", "")
            assert "parameters were changed in some replicas only (replica 0: no, replica 1: yes)" in stepped[1]
            assert "has other values in other replicas (replica 0: [" in scaled[1]
            assert "so they train apart" in hooked[1]  # still
        else:
            assert (stepped[0], hooked[0], again[0]) == ("", "UsageError", "UsageError")
            assert "which ParallelOptions(replicate='fsdp') cannot call" in hooked[1]
            assert "are spread or sharded already" in again[1]


@pytest.mark.slow
def test_a_policy_of_precision_counts_for_a_single_replica_too(told_others: Any) -> None:
    modules = stages()
    loss, _ = plain(modules, *batch(), F.mse_loss, ROW_SHARES)
    for rank in told_others:
        computed, dtypes, losses = rank["one_replica_in_low_precision"]
        assert computed == {torch.bfloat16}
        assert dtypes == {torch.float32}
        torch.testing.assert_close(losses[0], loss, rtol=0.02, atol=0.02)
        assert losses[1] < losses[0]


def test_a_failed_step_keeps_the_gradients_of_earlier_ones(told: Any) -> None:
    for rank in told:
        assert rank["a_failed_step_keeps_what_was_added_before"] == [("PeerFailure", True)] * 4


@pytest.mark.slow
def test_what_cannot_work_is_refused_by_name(told_others: Any) -> None:
    for place, rank in enumerate(told_others):
        counts, kinds, mixed, tied, turned, product, rest, sparse = rank["refused"]
        assert counts[0] == kinds[0] == product[0] == rest[0] == "UsageError"
        assert "microbatches: replica 1 has 5, replica 0 has 4" in counts[1]
        assert "replicate: replica 1 has fsdp, replica 0 has ddp" in kinds[1]
        assert mixed[0] == ("ModelError" if place < 2 else "PeerFailure")
        assert "stage 0 has trained parameters of torch.float32 and torch.float64" in mixed[1]
        assert tied[0] == "ModelError"
        assert "tied across stages" in tied[1]
        assert turned[0] == ("PeerFailure" if place < 2 else "ModelError")
        assert "1.linear.weight of stage 1 has shape (6, 6) with strides (1, 6)" in turned[1]
        assert "pp=3 x dp=2 x tp=1 = 6 processes, but there are 4" in product[1]
        assert "pp=3 x tp=1 = 3 does not divide the 4 processes" in rest[1]
        assert sparse[0] == "PeerFailure"
        assert "the gradient of 0.0.weight is sparse" in sparse[1]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["1f1b", "zb-v"])
def test_mixed_precision_computes_low_and_adds_up_high(told_others: Any, family: str) -> None:
    x, y = batch()
    modules = stages(2 if family == "1f1b" else 4)
    loss, wanted = plain(modules, x, y, F.mse_loss, ROW_SHARES)
    exact = {name: value.clone() for name, value in wanted.items()}
    for module in modules:
        module.zero_grad()
        module.bfloat16()
    total: dict[str, Tensor] = {}
    for (part, goal), share in zip([*cut(x, y, 0), *cut(x, y, 1)], ROW_SHARES, strict=True):
        out = part.bfloat16()
        for module in modules:
            out = module(out)
        (F.mse_loss(out.float(), goal) * share).backward()
        for name, parameter in nn.ModuleList(modules).named_parameters():
            total[name] = total.get(name, 0.0) + parameter.grad.float()
            parameter.grad = None
    found = by_name(told_others, lambda rank: rank["low_precision"][family][1])
    close(found, total, 1e-6)  # what is added up in bfloat16 is off by 1e-3 and more
    assert any(not torch.allclose(found[name], value, rtol=1e-4, atol=1e-6) for name, value in exact.items())
    for rank in told_others:
        assert rank["low_precision"][family][2] == {torch.float32}
        torch.testing.assert_close(rank["low_precision"][family][0], loss, rtol=0.02, atol=0.02)


def test_names_are_the_models_own_and_sharded_state_is_a_part_of_it(told: Any) -> None:
    names = sorted(nn.ModuleList(stages()).state_dict())
    for kind, share in (("ddp", 1), ("fsdp", 2)):
        for rank in told:
            mine, taken, again, local = rank["names_and_state"][kind]
            assert taken
            assert again
            assert local == 2 * (WIDTH * WIDTH + WIDTH) // share
            assert {name.split(".")[0] for name in mine} in ({"0", "3"}, {"1", "2"})
        assert sorted({name for rank in told for name in rank["names_and_state"][kind][0]}) == names


@pytest.mark.slow
def test_all_replicas_cut_by_the_times_of_the_first(told_others: Any) -> None:
    cuts = [rank["measured"] for rank in told_others]
    assert cuts == [cuts[0]] * 4
    assert cuts[0][0] < cuts[0][1]
