"""Pipelines on a pretended accelerator: ranks take its devices, and compute what a plain loop on one of them does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerator.harness import NAMES, on_device, on_ranks
from tiers import by_turns, mostly_slow
from torch import nn

import penstock
from penstock.errors import PeerFailure

DRAWN: dict[int, list[Any]] = {}  # by layer: (microbatch, mask, a number of the CPU's) of each forward


class Draws(nn.Module):
    """A layer that draws on its device, and on the CPU besides."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number

    def forward(self, x: Any) -> Any:
        import torch

        kept = nn.functional.dropout(torch.ones_like(x), 0.5)
        on_cpu = torch.rand(())
        DRAWN.setdefault(self.number, []).append((penstock.current_microbatch(), kept.detach().cpu(), on_cpu))
        return torch.tanh(self.linear(x) * kept + on_cpu)


def model_and_batch(drawing: bool = False, layers: int = 8) -> Any:
    import torch

    torch.manual_seed(0)
    modules = [Draws(number) if drawing else nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for number in range(layers)]
    return nn.Sequential(*modules), torch.randn(16, 8), torch.randn(16, 8)


def gradients(model: Any) -> list[Any]:
    return [parameter.grad.cpu() for parameter in model.parameters()]


def trained(model: Any, x: Any, y: Any, steps: int = 2, **options: Any) -> tuple[list[float], list[Any], set[str]]:
    pipe = penstock.Pipeline(model, microbatches=4, loss_fn=nn.MSELoss(), seed=5, **options)
    losses = [pipe.step(x, target=y).loss for _ in range(steps)]
    return [float(loss) for loss in losses], gradients(pipe), {str(each.device) for each in pipe.parameters()}


def plain(model: Any, x: Any, y: Any, device: Any, steps: int = 2, stages: int = 4) -> list[Any]:
    """The same by hand, on one device."""
    model, x, y = model.to(device), x.to(device), y.to(device)
    per_stage = len(model) // stages
    for step in range(steps):
        for number, (rows, wanted) in enumerate(zip(x.chunk(4), y.chunk(4), strict=True)):
            for stage in range(stages):
                with penstock.randomness(5, step, number, stage):
                    rows = model[stage * per_stage : (stage + 1) * per_stage](rows)
            (nn.functional.mse_loss(rows, wanted) / 4).backward()
    return gradients(model)


def every_family(drawing: bool) -> dict[str, str]:
    """What is wrong, by family and whether forwards run again."""
    import copy

    import torch
    from accelerator import pretend

    from penstock.schedule.builders import TRAINING

    model, x, y = model_and_batch(drawing)
    wanted = plain(copy.deepcopy(model), x, y, pretend.device(7))
    own = [torch.random.get_rng_state(), *torch.get_device_module(pretend.NAME).get_rng_state_all()]
    wrong = {}
    for family in TRAINING:
        for recompute in ("never", "always"):
            _, found, _ = trained(copy.deepcopy(model), x, y, stages=4, schedule=family, recompute=recompute)
            now = [torch.random.get_rng_state(), *torch.get_device_module(pretend.NAME).get_rng_state_all()]
            far = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
            if far > 1e-6:
                wrong[f"{family} {recompute}"] = f"gradients are {far} from those of a plain loop"
            if not all(map(torch.equal, own, now)):
                wrong[f"{family} {recompute}"] = "a generator of the user's was left somewhere else"
    return wrong


@pytest.mark.parametrize(("drawing", "name"), by_turns([False, True], NAMES))
def test_every_family_computes_what_a_plain_loop_on_one_device_does(drawing: bool, name: str) -> None:
    outcome = on_device(every_family, drawing, name=name)
    assert outcome.value == {}
    assert outcome.races == []


def places() -> dict[str, Any]:
    """Where parameters are, and how far gradients are from those of a plain loop, by how the pipeline was asked for."""
    import copy

    import torch
    from accelerator import pretend

    model, x, y = model_and_batch()
    wanted = plain(copy.deepcopy(model), x, y, pretend.device(7))
    found = {}

    def look(what: str, model: nn.Module, x: Any, y: Any, **options: Any) -> None:
        _, own, where = trained(copy.deepcopy(model), x, y, **{"stages": 4, **options})
        far = max(float((a - b).abs().max()) for a, b in zip(own, wanted, strict=True))
        found[what] = sorted(each.replace(pretend.NAME, "d") for each in where), far < 1e-6

    first, third, name = pretend.device(0), pretend.device(3), pretend.NAME
    look("by itself", model, x, y)
    look("eight ranks on eight", model, x, y, stages=8)
    look("left where it is", model, x, y, devices=None)
    there = copy.deepcopy(model).to(third)
    look("there already", there, x.to(third), y.to(third))
    look("there already, and asked to stay", there, x, y, devices=None)
    look("on the CPU and a device", model, x, y, stages=2, devices=["cpu", first])
    look("on a device and the CPU", model, x.to(first), y.to(first), stages=2, devices=[first, "cpu"])
    look("all on the CPU", model, x, y, stages=2, devices=["cpu", "cpu"])
    replayed = penstock.CutOptions(method="replay")
    look("replayed", model, x, y, example=(x[:2],), cut_options=replayed)
    look("replayed, there already", there, x, y, example=(x[:2],), cut_options=replayed)
    torch.accelerator.set_device_index(5)
    look("the current one", model, x, y, devices=[name] * 4)
    with torch.device(pretend.device(2)):
        look("with another default", model, x, y)
    return found


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_model_goes_where_its_ranks_are_and_stays_where_it_was_put(name: str) -> None:
    outcome = on_device(places, name=name)
    assert outcome.value == {
        "by itself": (["d:0", "d:1", "d:2", "d:3"], True),
        "eight ranks on eight": ([f"d:{number}" for number in range(8)], True),
        "left where it is": (["cpu"], True),
        "there already": (["d:3"], True),
        "there already, and asked to stay": (["d:3"], True),
        "on the CPU and a device": (["cpu", "d:0"], True),
        "on a device and the CPU": (["cpu", "d:0"], True),
        "all on the CPU": (["cpu"], True),
        "replayed": (["d:0", "d:1", "d:2", "d:3"], True),
        "replayed, there already": (["d:3"], True),
        "the current one": (["d:5"], True),
        "with another default": (["d:0", "d:1", "d:2", "d:3"], True),
    }
    assert outcome.races == []


def on_streams_of_its_own(follow: bool, deferred: bool) -> list[Any]:
    """Two steps of a caller that makes its batch, and reads gradients, on other streams than the default ones."""
    from contextlib import ExitStack, nullcontext

    import torch
    from accelerator import pretend

    from penstock.runtime.engine import rank_threads

    if not follow:
        rank_threads.as_caller = lambda *_: nullcontext()  # type: ignore[attr-defined,assignment]
    model, x, y = model_and_batch()
    pipe = penstock.Pipeline(model, stages=2, microbatches=4, loss_fn=nn.MSELoss(), seed=5)
    x, y = x.to(pretend.device(0)), y.to(pretend.device(1))
    pretend.clear()
    if deferred:
        pretend.defer()
    with ExitStack() as stack:
        for index in range(2):
            stack.enter_context(torch.Stream(device=pretend.device(index)))
        for _ in range(2):
            pipe.step(x * 1, target=y * 1)
        found = [parameter.grad * 1 for parameter in pipe.parameters()]
    for index in range(2):
        torch.accelerator.synchronize(index)
    return [each.cpu() for each in found]


@pytest.mark.parametrize("deferred", [False, True])
def test_ranks_follow_the_streams_of_the_caller(deferred: bool) -> None:
    outcome = on_device(on_streams_of_its_own, True, deferred)
    assert outcome.races == []
    model, x, y = model_and_batch()
    wanted = plain(model, x, y, "cpu")
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(outcome.value, wanted, strict=True))
    assert on_device(on_streams_of_its_own, False, deferred).races  # so the ledger sees it where they do not


def masks(schedule: str, recompute: str, deferred: bool = False) -> list[Any]:
    """What each local layer draws in two steps, by layer and in the order of microbatches."""
    from accelerator import pretend

    if deferred:
        pretend.defer()
    model, x, y = model_and_batch(drawing=True, layers=2)
    trained(model, x, y, stages=2, schedule=schedule, recompute=recompute)
    return [sorted(DRAWN[number], key=lambda each: each[0]) for number in sorted(DRAWN)]


def same_masks(one: list[Any], other: list[Any]) -> bool:
    import torch

    pairs = zip(one, other, strict=True)
    return all(a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in pairs)


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_recomputed_forward_draws_what_the_first_one_drew(name: str) -> None:
    """Whether a forward draws was judged by the generator of the CPU alone: on devices, 0 of 8 masks came again."""
    once = on_device(masks, "1f1b", "never", name=name).value
    twice = on_device(masks, "gpipe", "always", True, name=name).value
    processes = [outcome.value for outcome in on_ranks(2, masks, "gpipe", "always", name=name)]
    for layer in range(2):
        assert len(once[layer]) == 8
        assert len(twice[layer]) == 16
        assert same_masks(twice[layer][0::2], twice[layer][1::2])
        assert same_masks(once[layer], twice[layer][0::2])
        assert same_masks(processes[layer][0], twice[layer])


def kept_on_failure() -> list[bool]:
    """Whether the user's generators are where they were, after a step that fails."""
    import torch
    from accelerator import pretend

    model, x, y = model_and_batch(drawing=True, layers=4)
    model[2].forward = lambda x: 1 / 0
    own = [torch.random.get_rng_state(), *torch.get_device_module(pretend.NAME).get_rng_state_all()]
    with pytest.raises(PeerFailure):
        trained(model, x, y, stages=4)
    now = [torch.random.get_rng_state(), *torch.get_device_module(pretend.NAME).get_rng_state_all()]
    return [torch.equal(one, other) for one, other in zip(own, now, strict=True)]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_step_that_fails_puts_the_users_generators_back(name: str) -> None:
    assert on_device(kept_on_failure, name=name).value == [True] * 9


def dropouts_of_a_replayed_model() -> list[list[float]]:
    """Losses of a model with dropout that is replayed, by the number of stages."""
    from penstock.tools.train.config.settings import GPTOptions
    from penstock.tools.train.models.gpt import build_gpt

    def losses(stages: int, devices: Any) -> list[float]:
        import torch

        torch.manual_seed(0)
        model = build_gpt(GPTOptions(vocabulary=32, layers=4, width=16, heads=2, dropout=0.3), 12)
        tokens = torch.randint(0, 32, (8, 13))
        pipe = penstock.Pipeline(
            model,
            stages=stages,
            microbatches=4,
            loss_fn=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
            example=(tokens[:2, :-1],),
            cut_options=penstock.CutOptions(method="replay"),
            seed=5,
            devices=devices,
        )
        return [float(pipe.step(tokens[:, :-1], target=tokens[:, 1:]).loss) for _ in range(2)]

    return [losses(stages, "auto") for stages in (1, 2, 4)]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_dropout_of_a_replayed_model_does_not_depend_on_the_cut(name: str) -> None:
    one, two, four = on_device(dropouts_of_a_replayed_model, name=name).value
    assert two == pytest.approx(one, rel=1e-6)
    assert four == pytest.approx(one, rel=1e-6)


def microbatches_of_checkpoints() -> list[tuple[int | None, str]]:
    """What a checkpoint inside a layer is told as it runs again, on a thread of autograd's."""
    import threading

    from torch.utils.checkpoint import checkpoint

    seen = []

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def inner(self, x: Any) -> Any:
            seen.append((penstock.current_microbatch(), threading.current_thread().name))
            return self.linear(x)

        def forward(self, x: Any) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    _, x, y = model_and_batch()
    trained(nn.Sequential(Asks(), Asks()), x, y, steps=1, stages=2)
    return seen


def test_a_checkpoint_on_a_thread_of_autograds_knows_its_microbatch() -> None:
    seen = on_device(microbatches_of_checkpoints).value
    assert {number for number, _ in seen} == {0, 1, 2, 3}
    assert len(seen) == 16
    assert any(not thread.startswith("penstock-rank") for _, thread in seen)


def parities() -> list[bool]:
    from accelerator import pretend

    model, x, y = model_and_batch(drawing=True, layers=4)
    options = {"microbatches": 4, "loss_fn": nn.MSELoss()}
    devices = [pretend.device(1), pretend.device(2)]
    return [
        penstock.parity(model, x, target=y, pipeline={"stages": 2, **options}).exact,
        penstock.parity(model, x, target=y, pipeline={"stages": 2, "devices": devices, **options}).exact,
        penstock.parity(model, x, target=y, pipeline={"stages": 4, "schedule": "zb-v", **options}).exact,
    ]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_parity_compares_on_devices(name: str) -> None:
    assert on_device(parities, name=name).value == [True] * 3


def by_hand(stages: int) -> list[Any]:
    from accelerator import pretend

    return plain(*model_and_batch(drawing=True), pretend.device(6), stages=stages)


def on_processes_of_a_group(drawing: bool, devices: Any) -> tuple[list[float], list[Any], set[str]]:
    import torch

    torch.accelerator.set_device_index(0)  # a script of a user's that has not thought of it
    model, x, y = model_and_batch(drawing)
    return trained(model, x, y, stages=2, schedule="gpipe", devices=devices)


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_process_takes_the_device_of_its_local_rank(name: str) -> None:
    outcomes = on_ranks(2, on_processes_of_a_group, True, "auto", name=name)
    assert [outcome.value[2] for outcome in outcomes] == [{f"{name}:0"}, {f"{name}:1"}]
    assert [outcome.races for outcome in outcomes] == [[], []]
    wanted = on_device(by_hand, 2, name=name).value
    found = [each for outcome in outcomes for each in outcome.value[1]]
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(found, wanted, strict=True))


def recorded(slow: float) -> list[tuple[str, int, float, float]]:
    """The computes of a step whose kernels take long, while the host takes no time."""
    from accelerator import pretend

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            pretend.sleep(slow, x.device.index)
            return self.linear(x)

    _, x, y = model_and_batch()
    pipe = penstock.Pipeline(nn.Sequential(Slow(), Slow()), stages=2, microbatches=2, loss_fn=nn.MSELoss())
    pipe.step(x, target=y)
    pretend.clear()
    pretend.defer()
    with pipe.record() as timeline:
        pipe.step(x, target=y)
    return [(str(span.action), span.rank, span.start, span.end) for span in timeline.spans]


def test_a_recording_has_the_times_of_kernels_and_not_those_of_launches() -> None:
    spans = on_device(recorded, 0.1).value
    forwards = {action: (start, end) for action, _, start, end in spans if "F" in action}
    assert len(forwards) == 4
    assert all(end - start >= 0.09 for start, end in forwards.values())
    assert forwards["1F0"][0] >= forwards["0F0"][1] - 0.01  # which waits for it
    assert forwards["0F1"][0] < forwards["1F0"][1]  # on devices that run side by side


def from_pinned_memory() -> float:
    """How far gradients are from those of a plain loop, while kernels run behind the host and copies beside them."""
    import copy

    import torch
    from accelerator import pretend

    model, x, y = model_and_batch()
    wanted = plain(copy.deepcopy(model), x, y, pretend.device(7))
    pretend.clear()
    pretend.defer(True, 0.0005)
    _, found, _ = trained(model, x.pin_memory(), y.pin_memory(), stages=4)
    torch.accelerator.synchronize()
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_batches_are_copied_beside_the_kernels_and_there_in_time(name: str) -> None:
    """Without the wait for the copies this has 128 races, without `record_stream` 6."""
    outcome = on_device(from_pinned_memory, name=name)
    assert outcome.value < 1e-6
    assert outcome.races == []


def under_defaults_of_the_user(defaults: list[tuple[str, str]], folder: str) -> list[list[list[float]]]:
    """What a training makes of a model, by the default device and dtype."""
    import torch
    from pipeline.test_devices import train

    return [
        train(f"{folder}/{number}", device, getattr(torch, dtype)) for number, (device, dtype) in enumerate(defaults)
    ]


@pytest.mark.parametrize("processes", mostly_slow([False, True], True))
def test_defaults_of_the_user_change_nothing_on_devices(processes: bool, tmp_path: Path) -> None:
    defaults = [("cpu", "float32"), ("meta", "float32"), ("pretend:1", "float64"), ("meta", "float16")]
    arguments = (under_defaults_of_the_user, defaults, str(tmp_path))
    for outcome in on_ranks(2, *arguments) if processes else [on_device(*arguments)]:
        assert outcome.races == []
        assert outcome.value
        assert all(each == outcome.value[0] for each in outcome.value[1:])


def on_one_device(way: str) -> list[str]:
    """What two processes are told whose models are on the same device."""
    from accelerator import pretend

    from penstock.errors import UsageError

    model, x, y = model_and_batch(layers=2)
    devices: Any = "auto"
    if way == "moved":
        model.to(pretend.device(0))  # as by model.cuda() in every process
    else:
        devices = [pretend.device(0)] * 2
    told = []
    with penstock.Pipeline(model, stages=2, microbatches=4, loss_fn=nn.MSELoss(), devices=devices, timeout=20) as pipe:
        for _ in range(2):
            with pytest.raises((UsageError, PeerFailure)) as caught:
                pipe.step(x, target=y)
            told.append(str(caught.value))
    return told


@pytest.mark.parametrize("way", mostly_slow(["moved", "asked"], "moved"))
def test_processes_that_share_a_device_are_told_so(way: str) -> None:
    """NCCL refuses to connect them, by an error that names neither the ranks nor the device."""
    for outcome in on_ranks(2, on_one_device, way):
        for told in outcome.value:
            assert "ranks 0 and 1 both compute on pretend:0 of this host" in told


class WithLengths(nn.Module):
    """Passes on how long sequences are, in a tensor on the CPU, where `pack_padded_sequence` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        import torch

        return self.linear(x), torch.full((len(x),), 1, device="cpu")


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, passed: Any) -> Any:
        hidden, lengths = passed
        packed = nn.utils.rnn.pack_padded_sequence(hidden.unsqueeze(1), lengths, batch_first=True)
        return self.linear(packed.data)


def with_lengths(devices: Any) -> float:
    """How far a loss is from the plain loop's."""
    import torch

    torch.manual_seed(0)
    model, x = nn.Sequential(WithLengths(), Packed()), torch.randn(8, 8)
    wanted = float(nn.functional.mse_loss(model(x), x))
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=nn.MSELoss(), devices=devices, timeout=20) as pipe:
        return abs(float(pipe.step(x, target=x).loss) - wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", mostly_slow([False, True], False), ids=["threads", "processes"])
def test_what_a_stage_on_a_device_has_on_the_cpu_stays_there(processes: bool) -> None:
    """Threads moved it to the next rank's device."""
    for outcome in on_ranks(2, with_lengths, "auto") if processes else [on_device(with_lengths, "auto")]:
        assert outcome.value < 1e-6


def without_doubles() -> list[Any]:
    """Two steps on devices that have no float64, as some kinds of accelerator have none, and what they should give."""
    import torch
    from accelerator import pretend
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class NoDoubles(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor) and each.dtype is torch.float64 and each.device.type != "cpu":
                    raise TypeError(f"{function}: this kind of device has no float64")
            return made

    loss = nn.CrossEntropyLoss(torch.arange(1.0, 7.0))
    options = penstock.BatchOptions(batch_norm="deferred")
    found = []
    for devices in (["cpu", "cpu"], [pretend.device(0), pretend.device(1)]):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(8, 6))
        x, y = torch.randn(16, 8), torch.randint(0, 6, (16,))
        y[[1, 2, 9]] = -100
        given = {"loss_fn": loss, "devices": devices, "batch_options": options}
        with NoDoubles(), penstock.Pipeline(model, stages=2, microbatches=4, **given) as pipe:
            numbers = [float(pipe.step(x, target=y).loss) for _ in range(2)]
            found.append(numbers + [float(each.sum()) for name, each in pipe.named_buffers() if "running" in name])
    return found


def test_devices_that_have_no_float64_train() -> None:
    for outcome in on_ranks(2, without_doubles):
        on_cpu, on_devices = outcome.value
        assert on_devices == pytest.approx(on_cpu, rel=1e-5)
        assert outcome.races == []
