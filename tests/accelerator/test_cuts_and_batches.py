"""Where things are computed and kept: measuring, captured graphs, half precision and batches are for devices."""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from tiers import by_turns, mostly_slow


def layers(count: int = 4) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)])


def devices_of_measuring() -> set[str]:
    """The kinds of devices on which layers ran while a cut was balanced by time."""
    import torch
    from accelerator import pretend
    from torch import nn

    import penstock

    model, seen = layers(), set()
    for layer in model:
        layer[0].register_forward_pre_hook(lambda module, args: seen.add(args[0].device.type))
    there = [pretend.device(0), pretend.device(1)]
    with penstock.Pipeline(
        model,
        stages=2,
        microbatches=2,
        loss_fn=nn.MSELoss(),
        balance="time",
        example=(torch.randn(4, 8),),
        devices=there,
    ):
        return {"device" if each == pretend.NAME else each for each in seen}


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_layers_are_measured_on_the_device_that_they_will_run_on(name: str) -> None:
    assert on_device(devices_of_measuring, name=name).value == {"device"}


def cut_by_time(where: str) -> tuple[list[int], float]:
    """How a model whose first layer has a long kernel is cut, and how long that layer was measured to take, in ms."""
    import torch
    from accelerator import pretend
    from torch import nn

    import penstock
    from penstock.model.balance.profile import profile_layers

    class Slow(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            if x.device.type == pretend.NAME:
                pretend.sleep(SLOW, x.device.index)
            return self.inner(x)

    model = layers()
    model[0] = Slow(model[0])
    x = torch.randn(4, 8)
    there = pretend.device(3)
    if where == "there already":
        model, x = model.to(there), x.to(there)
    pretend.defer()
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=nn.MSELoss(), balance="time", example=(x,)) as pipe:
        counts = list(pipe.deployment.staged.balance)
    named = [(str(number), layer) for number, layer in enumerate(model)]
    weights = profile_layers(named, (x,), device=there, rounds=1, repeats=1)
    return counts, weights[0].milliseconds


SLOW = 0.05  # seconds of a kernel


@pytest.mark.parametrize("where", mostly_slow(["on the CPU", "there already"], "there already"))
def test_a_cut_by_time_goes_by_the_kernels_of_the_device_that_layers_are_on(where: str) -> None:
    """Of a model that was on another device than the current one, the launches were measured."""
    counts, milliseconds = on_device(cut_by_time, where).value
    assert counts == [1, 3]
    assert milliseconds >= 1e3 * SLOW


def captured() -> float:
    """How far gradients of a captured graph, its stages on two devices, are from the plain loop's."""
    import copy

    import torch
    from accelerator import pretend
    from torch import nn

    import penstock

    model, x = layers(), torch.randn(8, 8)
    alone = copy.deepcopy(model)
    nn.functional.mse_loss(alone(x), x).backward()
    wanted = dict(alone.named_parameters())
    with penstock.Pipeline(
        model,
        stages=2,
        microbatches=2,
        loss_fn=nn.MSELoss(),
        example=(x[:4],),
        devices=[pretend.device(0), pretend.device(1)],
        cut_options=penstock.CutOptions(method="graph"),
    ) as pipe:
        for home in ("cpu", pretend.device(0)):  # where the batch is makes no other graph
            pipe.zero_grad()
            pipe.step(x.to(home), target=x.to(home))
        pipe.predict(torch.randn(8, 3, 8))  # needs a graph of its own, of a model that is on two devices now
        found = {key: each.grad.cpu() for key, each in pipe.named_parameters() if each.grad is not None}
    assert set(found) == set(wanted)
    return max(float((each - wanted[key].grad).abs().max()) for key, each in found.items())  # type: ignore[operator]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_captured_graph_runs_on_several_devices(name: str) -> None:
    outcome = on_device(captured, name=name)
    assert outcome.value < 1e-6
    assert outcome.races == []


def loss_by_way_of_a_stream() -> float:
    """How far a loss is from the plain loop's, where the first rank computes on a stream of its own."""
    import torch
    from accelerator import hosts, pretend
    from torch import nn

    import penstock
    from penstock.schedule import Op

    model, x = layers(), torch.randn(8, 8)
    wanted = float(nn.functional.mse_loss(model(x), x))
    there = [pretend.device(0), pretend.device(1)]
    pretend.defer(lag=0.001)

    def handler(action: Any, context: Any) -> None:
        if action.stage == 0:
            own = torch.Stream(device=there[0])
            own.wait_stream(torch.accelerator.current_stream(there[0]))
            torch.accelerator.set_stream(own)
        context.run(action)

    with (
        hosts.apart(),
        penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=nn.MSELoss(), devices=there) as pipe,
    ):
        pipe.register(Op.F, handler)
        return abs(float(pipe.evaluate(x, target=x).loss) - wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_what_a_rank_hands_over_is_waited_for_on_every_kind_of_device(name: str) -> None:
    """An event was recorded for CUDA's tensors only."""
    outcome = on_device(loss_by_way_of_a_stream, name=name)
    assert outcome.value < 1e-6
    assert outcome.races == []


def dtypes(way: str) -> set[str]:
    """The dtypes that linear layers return in half precision, as the pipeline or the caller asks for it."""
    from contextlib import nullcontext

    import torch
    from accelerator import pretend
    from torch import nn

    import penstock

    model, x, seen = layers(), torch.randn(8, 8), set()
    for layer in model:
        layer[0].register_forward_hook(lambda module, args, output: seen.add(str(output.dtype)))
    there = [pretend.device(0), pretend.device(1)]
    precision: Any = "bf16" if way == "option" else None
    around = torch.autocast(pretend.NAME, dtype=torch.bfloat16) if way == "caller" else nullcontext()
    with (
        penstock.Pipeline(
            model,
            stages=2,
            microbatches=2,
            loss_fn=nn.MSELoss(),
            devices=there,
            precision=precision,
            recompute="always",
        ) as pipe,
        around,
    ):
        pipe.step(x, target=x)
    return seen


@pytest.mark.parametrize("way", ["option", "caller"])
@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_half_precision_is_that_of_the_device_whatever_its_kind(name: str, way: str) -> None:
    assert on_device(dtypes, way, name=name).value == {"torch.bfloat16"}


WIDE = 1 << 16  # numbers of a row: a batch of 8 takes 2 MiB


def most_memory() -> list[int]:
    """The most bytes that tensors of a step took on each device; only the first stage reads the wide inputs."""
    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn

    import penstock

    class Narrowed(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[:, :8] + x.mean(1, keepdim=True)

    rank = dist.get_rank() if dist.is_initialized() else None
    model = nn.Sequential(Narrowed(), *layers())
    devices = [pretend.device(each) for each in range(2)]
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=nn.MSELoss(), devices=devices, timeout=20) as pipe:
        for _ in range(2):
            pipe.step(torch.randn(8, WIDE), target=torch.randn(8, 8))
        mine = range(2) if rank is None else [rank]
        return [torch.accelerator.max_memory_allocated(each) for each in mine]


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
def test_inputs_go_to_the_ranks_that_read_them_and_to_no_others(processes: bool) -> None:
    """The whole batch went to every rank's device."""
    outcomes = on_ranks(2, most_memory) if processes else [on_device(most_memory)]
    first, last = [each for outcome in outcomes for each in outcome.value]
    assert first > 4 * WIDE
    assert last < 4 * WIDE


def from_one_pinned_buffer(way: str) -> list[float]:
    """How far losses or outputs are from the plain model's, where each batch is written to the place of the last."""
    import copy
    from collections.abc import Iterator

    import torch
    from accelerator import pretend
    from torch import nn

    import penstock

    model = layers().double()
    alone, batches = copy.deepcopy(model), [torch.randn(8, 8).double() for _ in range(4)]
    buffer, losses = batches[0].pin_memory(), [float(nn.functional.mse_loss(alone(x), x)) for x in batches]

    def written() -> Iterator[Any]:
        for x in batches:
            buffer.copy_(x)
            yield buffer, buffer
        buffer.fill_(float("nan"))

    pretend.defer(lag=0.05)
    with penstock.Pipeline(model, stages=2, microbatches=4, loss_fn=nn.MSELoss(), timeout=20) as pipe:
        if way == "predict":
            found = [pipe.predict(x) for x, _ in written()]
            pairs = [(one, alone(x)) for one, x in zip(found, batches, strict=True) if one is not None]
            return [float((one.cpu() - other).abs().max()) for one, other in pairs]
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.0)
        results = pipe.train_steps(written(), sgd) if way == "loop" else [pipe.step(x, target=y) for x, y in written()]
        return [abs(float(each.loss) - loss) for each, loss in zip(results, losses, strict=True)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("way", "processes"),
    by_turns(["predict", "loop", "step"], [False, True], fast=[("predict", False), ("loop", True)]),
)
def test_pinned_memory_is_the_users_again_when_a_call_returns(way: str, processes: bool) -> None:
    """Copies were still to come where nobody had read a loss: predictions were of the next batch, and steps of a loop
    trained on it."""
    outcomes = on_ranks(2, from_one_pinned_buffer, way) if processes else [on_device(from_one_pinned_buffer, way)]
    assert sum(len(each.value) for each in outcomes) >= 4
    assert all(far < 1e-12 for each in outcomes for far in each.value)


def built() -> str:
    from torch import nn

    import penstock
    from penstock.errors import PenstockError

    try:
        with penstock.Pipeline(layers(), stages=2, microbatches=2, loss_fn=nn.MSELoss(), timeout=20):
            return "built"
    except PenstockError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "queues", "found"),
    mostly_slow(
        [("cuda", "1", "give 8 to 32"), ("cuda", "8", "built"), ("pretend", "1", "built")],
        ("cuda", "1", "give 8 to 32"),
    ),
)
def test_a_device_with_few_queues_is_refused_on_all_ranks(name: str, queues: str, found: str) -> None:
    """With one queue for all streams, communicators may wait for each other for ever."""
    for outcome in on_ranks(2, built, name=name, environment={"CUDA_DEVICE_MAX_CONNECTIONS": queues}):
        assert found in outcome.value
