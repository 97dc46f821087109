"""What pieces weigh, and that weighing leaves no trace on the user's model."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ModelError, UsageError
from penstock.model.balance import measure
from penstock.model.balance.partition import counts_of, partition
from penstock.model.balance.profile import (
    Weight,
    crossing_of,
    memory_rows,
    piece_weights,
    profile_calls,
    profile_layers,
    weights_by_name,
)
from penstock.model.replay.recording.example_run import record
from penstock.model.replay.recording.units import find_units


class Slow(nn.Module):
    """Takes its time, in forward or backward, and counts its calls where nobody looks."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seconds = seconds
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        time.sleep(self.seconds)
        return torch.dropout(self.layer(x), 0.5, self.training)


class Net(nn.Module):
    """Keyword arguments, glue in place, a layer used twice, a tied head, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList([Slow(0.0), Slow(0.02), Slow(0.001)])
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, scale=1.0):
        x = self.embed(ids).mean(1)
        x *= scale
        for block in self.blocks:
            x = self.drop(self.norm(x) + block(x=x))
        return {"logits": self.head(x)}


@pytest.fixture
def clock(monkeypatch):
    """A clock that only sleeping moves: what a layer takes does not depend on the machine's load."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(measure, "_clock", lambda: nullcontext(lambda: now[0]))


def layers_of(model):
    return list(model._modules.items())


@pytest.mark.usefixtures("clock")
def test_time_is_forward_and_backward_of_each_layer():
    class SlowBack(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.03)
            return grad

    class Back(nn.Module):
        def forward(self, x):
            return SlowBack.apply(x)

    model = nn.Sequential(nn.Linear(8, 8), Slow(0.02), Back(), nn.Linear(8, 2))
    weights = profile_layers(layers_of(model), (torch.randn(4, 8),), rounds=2, repeats=3)
    times = [weight.milliseconds for weight in weights]
    assert times == pytest.approx([0, 20, 30, 0])


@pytest.mark.usefixtures("clock")
def test_a_unit_call_is_measured_with_its_own_arguments():
    model, ids = Net(), torch.randint(0, 50, (4, 5))
    recording = record(model, find_units(model), (ids,), {"scale": 2.0})
    weights = profile_calls(model, recording, (ids,), {"scale": 2.0}, rounds=1)
    by_name = {weight.name: weight for weight in weights}
    assert [weight.name for weight in weights] == [call.unit for call in recording.calls]
    assert [by_name[f"blocks.{number}"].milliseconds for number in range(3)] == pytest.approx([0, 20, 1])
    assert by_name["head"].output_bytes == 4 * 50 * 4
    assert by_name["embed"].parameters == 400
    assert by_name["head"].parameters == 0  # tied: counted once, where it is used first


def test_nothing_is_left_behind():
    model, ids = Net(), torch.randint(0, 50, (4, 5))
    model.norm.eval()
    recording = record(model, find_units(model), (ids,), {})
    hooked = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hooked.append)
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    generator, inputs = torch.get_rng_state(), ids.clone()
    profile_calls(model, recording, (ids,), {}, rounds=2)
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(inputs, ids)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not hooked
    for name, module in model.named_modules():
        assert module.__dict__ == attributes[name]
    assert model.training
    assert not model.norm.training


def test_a_failure_leaves_nothing_behind_either():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("mine")

    model = nn.Sequential(Slow(0.0), Fails())
    with pytest.raises(RuntimeError, match="mine"):
        profile_layers(layers_of(model), (torch.randn(4, 8),))
    assert model[0].calls == 0
    assert model[0].seen == 0
    assert "forward" not in model[0].__dict__


def test_activation_bytes_are_counted_by_storage_and_once():
    rows, width = 16, 32
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(width, width), relu, nn.Linear(width, width), relu, nn.Flatten())
    weights = profile_layers(layers_of(model), (torch.randn(rows, width),), rounds=1, repeats=1)
    one = rows * width * 4
    # the first keeps its input, each ReLU its output, which the Linear after it keeps as well: counted once
    assert [weight.activation_bytes for weight in weights] == [one, one, 0, one, 0]
    assert [weight.output_bytes for weight in weights] == [one] * 5
    assert crossing_of(weights) == [0, one, one, one, one]


def test_work_in_place_on_arguments_is_measured_on_copies():
    x = torch.randn(4, 8)
    before = x.clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True))
    assert len(profile_layers(layers_of(model), (x,), rounds=1)) == 3
    assert torch.equal(x, before)


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("sgd-momentum", 1), ("adamw", 2)])
def test_memory_is_parameters_gradients_optimizer_state_and_activations(optimizer, states):
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight.requires_grad_(False)
    weights = profile_layers(layers_of(model), (torch.randn(16, 32),), optimizer=optimizer, rounds=1, repeats=1)
    size, kept = 32 * 32 * 4, 16 * 32 * 4
    assert weights[0].state_bytes == size * (2 + states)
    assert weights[1].state_bytes == size  # frozen: neither gradient nor state
    assert weights[0].activation_bytes == kept
    assert weights[1].activation_bytes == 0  # it needs its weight for the backward, and not its input
    assert piece_weights("memory", weights) == [size * (2 + states) + kept, size]
    assert memory_rows(weights, [3, 1]) == [[size * (2 + states) + 3 * kept, size], [size * (2 + states) + kept, size]]


def test_early_stages_of_1f1b_get_less_because_they_hold_more_microbatches():
    weights = [Weight(str(n), parameters=1, parameter_bytes=10, activation_bytes=100) for n in range(12)]
    counts = counts_of(partition(piece_weights("memory", weights, [3, 2, 1]), 3).cuts, 12)
    assert counts == sorted(counts)
    assert counts[0] < 4 < counts[2]


def test_without_an_example_there_are_parameters_only():
    weights = profile_layers(layers_of(nn.Sequential(nn.Linear(3, 4), nn.ReLU())))
    assert piece_weights("parameters", weights) == [16, 0]
    with pytest.raises(UsageError, match="pass example="):
        piece_weights("time", weights)
    with pytest.raises(UsageError, match=r"'flops'.*choose one of 'parameters', 'time', 'memory'"):
        piece_weights("flops", weights)


def test_parameters_on_the_meta_device_can_be_counted_but_not_timed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert piece_weights("parameters", profile_layers(layers_of(model))) == [72, 72]
    with pytest.raises(ModelError, match=r"0\.weight is on the meta device"):
        profile_layers(layers_of(model), (torch.randn(2, 8),))


def test_another_path_than_the_recorded_one_is_an_error():
    model, ids = Net(), torch.randint(0, 50, (4, 5))
    recording = record(model, find_units(model), (ids,), {})
    model.blocks = model.blocks[:2]
    modules = dict(model.named_modules())
    with pytest.raises((ModelError, KeyError)):
        profile_calls(model, recording, (ids,), {}, rounds=1)
    assert all("forward" not in module.__dict__ for module in modules.values())


def test_all_ranks_take_the_first_ranks_numbers():
    model, x = nn.Sequential(Slow(0.0), nn.Linear(8, 8)), torch.randn(4, 8)
    told: list[list[float]] = []

    def first(values):
        told.append(values)
        return values

    mine = profile_layers(layers_of(model), (x,), rounds=1, agree=first)
    others = profile_layers(layers_of(model), (x,), measured=False, agree=lambda values: told[0])
    assert others == mine
    assert others[0].milliseconds > 0
    assert isinstance(others[0].parameters, int)
    with pytest.raises(ModelError, match="2 pieces of the model, the first rank 1; build the same model"):
        profile_layers(layers_of(model), agree=lambda values: values[:7])


NAMED = [Weight(name, parameters=1) for name in ("embed", "layers.0.a", "layers.0.b", "layers.1.a", "head")]


def test_weights_by_name_take_the_name_itself_before_the_longest_pattern():
    assert weights_by_name({"embed": 3, "*": 1, "layers.*": 2, "layers.0": 5, "layers.0.b": 7}, NAMED) == [
        3,
        5,
        7,
        2,
        1,
    ]


def test_pieces_without_parameters_may_be_left_out():
    assert weights_by_name({"fc": 2}, [Weight("fc", parameters=5), Weight("relu")]) == [2, 0]


def test_unknown_and_missing_names_are_errors():
    with pytest.raises(ModelError, match=r"'embd' names no piece of the model; near: embed"):
        weights_by_name({"embd": 1, "*": 1}, NAMED)
    with pytest.raises(ModelError, match=r"'zzz' names no piece of the model; there are: embed, layers.0.a"):
        weights_by_name({"zzz": 1}, NAMED)
    with pytest.raises(ModelError, match=r"no weight for embed, head; add them, or '\*': 1"):
        weights_by_name({"layers.*": 1}, NAMED)
    with pytest.raises(UsageError, match="optimizer='adamx'"):
        profile_layers([], optimizer="adamx")


def test_describe_shows_units_and_what_was_measured():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    pipe = penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    try:
        plain = pipe.describe().splitlines()
        assert plain[0].split("  ")[0] == "stage"
        assert "3 (0 .. 2)" in plain[1]
        assert "ms" not in plain[0]
        weight = Weight("x", milliseconds=1.5, activation_bytes=2_000_000, output_bytes=4096)
        pipe.deployment.staged = replace(pipe.deployment.staged, weights=(weight,) * 5, cuts=(3,))
        head, first, second = pipe.describe().splitlines()[:3]
        assert "ms  activation MB  bytes out" in head
        assert "4.50           6.00      4,096" in first
        assert "3.00           4.00      4,096" in second
        assert any(line.startswith("links") for line in pipe.describe().splitlines())
    finally:
        pipe.close()


class Seen(nn.Linear):
    weights: list[nn.Parameter]

    def forward(self, x):
        self.weights.append(self.weight)
        return super().forward(x)


def test_a_piece_is_measured_with_copies_on_the_device_and_has_its_own_weights_again_afterwards():
    """`balance="time"` measured on the CPU, because stages move to their devices after the model is cut."""
    model = nn.Sequential(Seen(4, 4), nn.LSTM(4, 4))
    model[0].weights = []
    own = dict(model.named_parameters())
    values = {name: value.detach().clone() for name, value in own.items()}
    order = ["0", "1"]
    device = torch.device("cpu")
    measure.measure(model, dict(model.named_modules()), order, lambda: model(torch.randn(2, 4)), 1, 1, device)
    assert all(weight is not own["0.weight"] and torch.equal(weight, own["0.weight"]) for weight in model[0].weights)
    assert dict(model.named_parameters()).keys() == own.keys()
    assert all(value is own[name] and torch.equal(value, values[name]) for name, value in model.named_parameters())
    assert all(any(flat is each for each in own.values()) for flat in model[1]._flat_weights)
