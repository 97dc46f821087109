"""The face of it: names, state, arguments that do not fit, on threads."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, ScheduleError, UsageError
from penstock.schedule import Schedule, build, lower


class Net(nn.Module):
    """A layer with a parameter, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Net(), nn.ReLU(), Net(), nn.Linear(4, 4))


# --- names and state


@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": 4}, {"balance": [3, 1]}, {"stages": 1}])
def test_names_are_those_of_the_whole_model(options: dict[str, Any]) -> None:
    model = sequential()
    pipe = penstock.Pipeline(model, microbatches=2, loss_fn=F.mse_loss, **options)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for (_, a), (_, b) in zip(pipe.named_parameters(), model.named_parameters(), strict=True))
    assert [name for name, _ in pipe.named_buffers()] == [name for name, _ in model.named_buffers()]
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_names_of_a_list_of_stages_are_those_of_a_module_list() -> None:
    modules = list(sequential())
    pipe = penstock.Pipeline(modules, microbatches=2, loss_fn=F.mse_loss)
    assert list(pipe.state_dict()) == list(nn.ModuleList(modules).state_dict())


def test_a_checkpoint_of_the_plain_model_loads_and_ours_loads_there() -> None:
    plain, model = sequential(), sequential()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    pipe = penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=F.mse_loss)
    pipe.load_state_dict(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    x = torch.randn(4, 4)
    pipe.step(x, target=x)
    other = sequential()
    other.load_state_dict(pipe.state_dict())


def test_a_state_that_does_not_fit_is_an_error_that_names_what_is_missing_and_unknown() -> None:
    pipe = penstock.Pipeline(sequential(), stages=2, microbatches=2, loss_fn=F.mse_loss)
    state = pipe.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    wrong = {**state, "other.weight": torch.ones(1)}
    del wrong["3.bias"]
    with pytest.raises(ModelError, match=r"missing \['3.bias'\], unknown \['other.weight'\]"):
        pipe.load_state_dict({name: value + 1 for name, value in wrong.items()})
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_a_state_of_other_shapes_is_refused_before_anything_is_loaded() -> None:
    pipe = penstock.Pipeline(sequential(), stages=2, microbatches=2, loss_fn=F.mse_loss)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    shape = tuple(before["3.bias"].shape)
    wrong = {name: value + 1 for name, value in before.items()} | {"3.bias": torch.ones(7)}
    with pytest.raises(ModelError, match=re.escape(f"of another shape ['3.bias (7,), not {shape}']")):
        pipe.load_state_dict(wrong)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_a_layer_that_loads_other_shapes_in_its_own_way_may() -> None:
    class Cropped(nn.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
            state[prefix + "weight"] = state[prefix + "weight"][: self.out_features]
            super()._load_from_state_dict(state, prefix, *others)

    pipe = penstock.Pipeline([Cropped(2, 2), nn.Linear(2, 2)], microbatches=2, loss_fn=F.mse_loss)
    pipe.load_state_dict({**pipe.state_dict(), "0.weight": torch.arange(6.0).reshape(3, 2)})
    assert torch.equal(pipe.state_dict()["0.weight"], torch.arange(4.0).reshape(2, 2))


def test_state_that_only_the_module_knows_is_saved_and_loaded() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    stages = [Counting(2, 2), Counting(2, 2)]
    stages[0].count, stages[1].count = 3, 4
    pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    state = pipe.state_dict()
    assert list(state) == list(nn.ModuleList(stages).state_dict())
    stages[0].count = stages[1].count = 0
    pipe.load_state_dict(state)
    assert (stages[0].count, stages[1].count) == (3, 4)


def test_a_parameter_tied_between_stages_is_listed_once_and_gets_both_gradients() -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4) for _ in range(4)]
    stages[3].weight = stages[0].weight
    pipe = penstock.Pipeline(stages, microbatches=2, schedule="zb-v", loss_fn=F.mse_loss)
    assert [name for name, _ in pipe.named_parameters()].count("3.weight") == 0
    x = torch.randn(4, 4)
    pipe.step(x, target=x)
    found = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    pipe.zero_grad()
    F.mse_loss(nn.Sequential(*stages)(x), x).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in pipe.parameters()])


def test_a_layer_that_stands_in_the_model_twice_is_in_the_pipeline_twice() -> None:
    torch.manual_seed(0)
    twice = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), twice, nn.Linear(4, 4), twice, nn.Linear(4, 4), twice)
    pipe = penstock.Pipeline(model, stages=3, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4)
    torch.testing.assert_close(pipe.predict(x), model(x).detach())


# --- training


def test_buffers_after_the_first_step_are_those_of_the_plain_loop() -> None:
    model, plain = sequential(), sequential()
    pipe = penstock.Pipeline(model, stages=4, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(6, 4)
    for _ in range(2):
        pipe.step(x, target=x)
        for rows in x.split(3):
            plain(rows)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_autocast_of_the_caller_holds_in_the_ranks() -> None:
    pipe = penstock.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe.predict(torch.randn(4, 4)).dtype is torch.bfloat16
    assert pipe.predict(torch.randn(4, 4)).dtype is torch.float32


def test_train_and_eval_set_the_mode_of_all_stages() -> None:
    pipe = penstock.Pipeline([nn.Dropout(0.9), nn.Linear(4, 4)], microbatches=2, loss_fn=F.mse_loss)
    x = torch.ones(4, 4)
    pipe.eval()
    assert torch.equal(pipe.step(x, target=x, outputs=True).output, pipe.predict(x))
    pipe.train()
    assert not torch.equal(pipe.step(x, target=x, outputs=True).output, pipe.predict(x))


def test_the_caller_cannot_run_two_steps_at_once() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.leave = threading.Event(), threading.Event()

        def forward(self, x: Tensor) -> Tensor:
            self.inside.set()
            self.leave.wait(20)
            return x

    slow = Slow()
    pipe = penstock.Pipeline([nn.Linear(4, 4), slow], microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4)
    other = threading.Thread(target=lambda: pipe.step(x, target=x))
    other.start()
    try:
        assert slow.inside.wait(20)
        with pytest.raises(UsageError, match="in a step already"):
            pipe.step(x, target=x)
    finally:
        slow.leave.set()
        other.join()
    pipe.step(x, target=x)


def test_a_pipeline_that_is_dropped_takes_its_threads_and_model_with_it() -> None:
    before = set(threading.enumerate())  # an earlier test's may end meanwhile
    stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss)
    x = torch.randn(4, 4)
    pipe.step(x, target=x)
    watched = [weakref.ref(stage) for stage in stages]
    pipe.close()
    assert set(threading.enumerate()) <= before
    del pipe, stages
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


# --- arguments that do not fit: the fact, the numbers, the remedy


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": linears(7), "ranks": 4}, "7 stages cannot fill 4 ranks evenly; split into 8, or pass ranks=1"),
        ({"model": linears(2), "ranks": 3}, "2 stages cannot fill 3 ranks evenly; split into 3, or pass ranks=2"),
        ({"model": linears(2), "ranks": 0}, "ranks=0: a pipeline has at least 1"),
        (
            {"model": linears(3), "schedule": "zb-v"},
            "zb-v has 2 stages on each rank.* got 3 stages: split into 4, or take",
        ),
        (
            {"model": linears(4), "schedule": "zb-v", "ranks": 4},
            "got 4 stages for 4 ranks: split into 8, or take schedule='zb-h1'",
        ),
        (
            {"model": linears(5), "schedule": "ZBVZeroBubble", "ranks": 2},
            "zb-v has .* got 5 stages for 2 ranks: split into 4$",
        ),
        ({"model": linears(2), "schedule": "zbv2"}, "there is no schedule 'zbv2'; did you mean zb-v?"),
        ({"model": linears(3), "stages": 2}, "stages=2, but the list has 3 stage modules"),
        ({"model": sequential(), "stages": 5}, "4 layers cannot make 5 stages; pass stages= from 1 to 4"),
        ({"model": sequential(), "balance": [2, 1]}, r"balance=\[2, 1\] sums to 3, but the model has 4 layers"),
        ({"model": sequential(), "balance": [4, 0]}, r"balance=\[4, 0\]: each stage needs at least 1 layer"),
        ({"model": sequential()}, "say how many stages to cut the 4 layers into"),
        ({"model": []}, "the model is an empty list"),
        ({"model": [nn.Linear(4, 4), 3]}, "entry 1 of the list of stages is a int"),
        ({"model": linears(2), "microbatches": None}, "say how many microbatches a batch is cut into"),
        ({"model": linears(2), "microbatches": 0}, "microbatches must be a whole number of at least 1, got 0"),
        ({"model": linears(2), "timeout": 0}, "timeout=0: timeout is in seconds and above 0"),
        ({"model": linears(2), "transport": "pigeon"}, "transport='pigeon': choose one of"),
        ({"model": linears(2), "transport": "distributed"}, "needs a process group: start with torchrun"),
        ({"model": linears(2), "devices": ["cpu"]}, "1 devices for 2 ranks"),
        (
            {"model": linears(4), "cut_options": penstock.CutOptions(skips=[(3, 1)])},
            "the edge 3 -> 1 does not fit 4 stages",
        ),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], words: str) -> None:
    arguments = {"microbatches": 2, "loss_fn": F.mse_loss, **options}
    with pytest.raises((UsageError, ModelError), match=words):
        penstock.Pipeline(arguments.pop("model"), **arguments)


def test_a_searched_schedule_has_a_rank_for_each_stage_unless_told_otherwise() -> None:
    for options, ranks in (({}, 4), ({"ranks": 2}, 2), ({"ranks": 1}, 1)):
        with penstock.Pipeline(linears(4), schedule="auto", microbatches=3, loss_fn=F.mse_loss, **options) as pipe:
            assert (pipe.schedule.name, pipe.schedule.ranks, pipe.schedule.stages) == ("auto", ranks, 4)
    with pytest.raises(UsageError, match="4 stages cannot fill 3 ranks evenly"):
        penstock.Pipeline(linears(4), schedule="auto", microbatches=3, ranks=3, loss_fn=F.mse_loss)


@pytest.mark.parametrize(
    ("schedule", "options", "words"),
    [
        (build("1f1b", 4, 2), {}, "the schedule is for 4 stages, the model has 2"),
        (build("1f1b", 2, 3), {"microbatches": 2}, "microbatches=2, but the schedule is for 3; leave it out"),
        (build("1f1b", 2, 3), {"ranks": 3}, "ranks=3, but the schedule is for 2 ranks; leave ranks= out"),
        (Schedule.from_text("0F0 0B0\n1F0"), {}, "1B0|no B|backward"),
    ],
)
def test_schedules_that_do_not_fit_the_model(schedule: Schedule, options: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, ScheduleError), match=words):
        penstock.Pipeline(linears(2), schedule=schedule, loss_fn=F.mse_loss, **options)


def test_a_lowered_schedule_must_know_the_models_skips() -> None:
    lowered = lower(build("1f1b", 4, 2))
    with pytest.raises(UsageError, match=r"for the skips \[\], but the model's skips are \[\(0, 3\)\]"):
        penstock.Pipeline(
            linears(4), schedule=lowered, cut_options=penstock.CutOptions(skips=[(0, 3)]), loss_fn=F.mse_loss
        )
    penstock.Pipeline(
        linears(4), schedule=build("1f1b", 4, 2), cut_options=penstock.CutOptions(skips=[(0, 3)]), loss_fn=F.mse_loss
    )
