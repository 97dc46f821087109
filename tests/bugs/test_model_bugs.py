"""What went wrong in silence when models were cut by replay: losses and gradients of another model, and no error."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from model.containers import GPT, batch
from model.nets import Chain, W, rows, square, trains
from processes import on_processes
from torch import Tensor, nn

import penstock
from penstock import CutOptions
from penstock.errors import ModelError, PeerFailure

OTHER_PATH = r"took another path than with the example: the output needs a value"


class Skips(Chain):
    """The first unit's output reaches the end only sometimes, and no tensor is read to decide that."""

    def forward(self, x: Tensor, gate: Tensor | None = None, *, skip: bool = False, bias: Tensor | None = None) -> Any:
        first = y = self.blocks[0](x)
        for block in list(self.blocks)[1:]:
            y = torch.tanh(block(y))
        if x.shape[1] > W or gate is not None or bias is not None or skip or not self.training:
            y = y + first * (1.0 if gate is None else gate)
        return y


class Long(Skips):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mean(1), skip=x.shape[1] > 4)


def piped(model: nn.Module, example: Any, **options: Any) -> penstock.Pipeline:
    options = {
        "stages": 2,
        "microbatches": 2,
        "loss_fn": square,
        "cut_options": penstock.CutOptions(method="replay"),
        **options,
    }
    return penstock.Pipeline(model, example=example, **options)


@pytest.mark.parametrize("given", [{"gate": rows()}, {"bias": rows()}, {"skip": True}])
def test_an_input_that_the_example_did_not_have_opens_no_way_around_the_plan(given: dict[str, Any]) -> None:
    """The plan did not send the first output on, and the last stage added a stand-in of zeros instead."""
    x = rows()
    with piped(Skips(), (x[:2],)) as pipe:
        pipe.step(x)
        with pytest.raises((ModelError, PeerFailure), match=OTHER_PATH):
            pipe.step(x, **given)
        pipe.step(x)


def test_another_length_than_the_examples_opens_no_way_around_the_plan() -> None:
    with piped(Long(), (rows(2, 3, W),)) as pipe:
        pipe.step(rows(4, 4, W))
        with pytest.raises((ModelError, PeerFailure), match=OTHER_PATH):
            pipe.step(rows(4, 5, W))


def test_another_mode_than_the_examples_opens_no_way_around_the_plan() -> None:
    x = rows()
    with piped(Skips(), (x[:2],)) as pipe, pytest.raises((ModelError, PeerFailure), match=OTHER_PATH):
        pipe.predict(x)


class Counts(Chain):
    """What it counts at the end, it reads at the beginning: stages that end before saw the first count for ever."""

    count = 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x * self.count)
        self.count = self.count + 1
        return y


class Remembers(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(W)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x + self.memory)
        self.memory = 0.5 * self.memory + y.detach().mean(0)
        return y


class RemembersInABuffer(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(W))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x + self.memory)
        self.memory = 0.5 * self.memory + y.detach().mean(0)
        return y


class Late(Chain):
    """Read where it is written, but made of what that stage does not have."""

    memory: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        y: Tensor = self.blocks[3](torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first)))))
        y = y + self.memory
        self.memory = first.detach().mean(0)
        return y


class InPlace(Chain):
    """On threads all stages have the one tensor, and each counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = super().forward(x)
        return y * self.calls


@pytest.mark.parametrize(
    ("net", "what"),
    [
        (Counts, "keeps count from one call"),
        (Remembers, "keeps memory"),
        (RemembersInABuffer, "keeps memory"),
        (Late, "keeps memory, made of units' values"),
        (InPlace, "changes calls in place"),
    ],
)
def test_what_the_glue_keeps_from_call_to_call_is_refused(net: type[Chain], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        trains(net(), rows())


class Caches(Chain):
    """What is made on the way and used from there on, or written before all units, every stage has."""

    calls = 0
    table: Tensor | None = None
    shape: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = torch.tanh(self.blocks[0](x)) * self.calls
        if self.table is None:
            self.table = torch.linspace(0, 1, W)
            self.mask = y.new_ones(W)
        y = self.blocks[1](y * self.table * self.mask)
        self.shape = tuple(y.shape)
        self.seen = [y]
        return self.blocks[3](torch.tanh(self.blocks[2](y))).view(self.shape)


def test_a_cache_in_the_glue_is_no_memory() -> None:
    torch.manual_seed(0)
    assert trains(Caches(), rows(), stages=4) == 0.0


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y[:, :2]


class WritesOneView(Chain):
    def __init__(self) -> None:
        super().__init__(4, TwoViews)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, view = block(x)
            view.mul_(3.0)
            x = torch.tanh(y)
        return x


def test_outputs_that_share_memory_are_refused_where_one_is_written_to_and_the_other_read() -> None:
    """Each became a copy of its own, so that the other did not change with it. The graph has no such trouble."""
    with pytest.raises(ModelError, match=r"blocks\.0 returns tensors that share memory"):
        trains(WritesOneView(), rows())
    torch.manual_seed(0)
    assert trains(WritesOneView(), rows(), cut_options=CutOptions(method="graph")) == 0.0


class Sum(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(W, W), wrap

    def forward(self, x: Tensor, scale: Any = None) -> tuple[Tensor, Any]:
        factor = 1.0 if scale is None else float(np.asarray(getattr(scale, "value", scale)).sum())
        return torch.tanh(self.linear(x)) * factor, self.wrap(float(x.detach().sum()))


@dataclass
class Boxed:
    value: float


class Box:
    def __init__(self, value: float) -> None:
        self.value = value


class HandsOn(Chain):
    def __init__(self, wrap: Any) -> None:
        super().__init__(4, lambda: Sum(wrap))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        scale = None
        for block in self.blocks:
            x, scale = block(x, scale)
        return x


@pytest.mark.parametrize("wrap", [float, Boxed, Box, lambda value: np.array([value])])
def test_a_value_that_is_no_tensor_is_not_taken_from_the_example(wrap: Any) -> None:
    """Only numbers and strings were compared: arrays and objects were those of the example, on all other stages."""
    with pytest.raises((ModelError, PeerFailure), match="which is no tensor and so not sent"):
        trains(HandsOn(wrap), rows())


class OneNorm(nn.Module):
    """One batch norm behind every layer: on two stages its updates came in another order, on processes in two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(W, W) for _ in range(4)), nn.BatchNorm1d(W)
        self.head = nn.ModuleList(nn.Linear(W, W) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.norm(layer(x)))
        for layer in self.head:
            x = torch.tanh(layer(x))
        return x


def test_a_unit_that_updates_itself_is_on_one_stage() -> None:
    torch.manual_seed(0)
    assert trains(OneNorm(), rows(), stages=3) == 0.0
    with pytest.raises(ModelError, match=r"no cut would part norm\.running_mean from code"):
        trains(OneNorm(), rows(), stages=5)
    with pytest.raises(ModelError, match=r"norm is called on stages 0 and 1 and updates running_mean at each call"):
        trains(OneNorm(), rows(), stages=None, split_at=["layers.2"])


class Packed(nn.Module):
    """`pad_packed_sequence` reads the sizes straight from memory: nothing said that it needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(20, W), nn.LSTM(W, W, 2, batch_first=True), nn.Linear(W, 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        value: Tensor = self.head(out)
        return value


def test_a_packed_sequence_crosses_a_cut_with_its_sizes() -> None:
    torch.manual_seed(0)
    assert trains(Packed(), torch.randint(0, 20, (4, 5)), torch.tensor([5, 3, 5, 3]), stages=3) == 0.0


class Warm(Chain):
    """A temperature that the training loop lowers; blocks with a setting of their own."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__(4, lambda: nn.LayerNorm(W))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y / self.temperature


def test_what_the_user_sets_on_the_model_reaches_its_stages() -> None:
    """Stages run copies of the model's modules, which kept what they were made with."""
    torch.manual_seed(0)
    model, x = Warm(), rows()
    with piped(model, (x[:2],), stages=4) as pipe:
        for temperature, eps in ((1.0, 1e-5), (0.5, 0.1), (0.25, 0.3)):
            model.temperature = temperature
            model.blocks[1].eps = eps
            expected = sum(square(model(part)) for part in x.chunk(2)) / 2
            assert pipe.step(x).loss == expected


def test_buffers_without_values_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W))
    with pytest.raises(ModelError, match=r"3 buffers of Sequential have no values \(1\.running_mean, .*penstock\.lazy"):
        penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=square)


class Stashes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.balance = nn.Linear(W, W), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.balance = y.square().mean()
        return y


def test_a_loss_that_a_unit_keeps_on_itself_is_told_of() -> None:
    """A loss_fn that added up `block.balance` got the zeros of the constructor: the extra loss was lost in silence."""
    with pytest.warns(UserWarning, match=r"blocks\.0\.balance, .*sees an old value.*penstock\.add_loss"):
        trains(Chain(4, Stashes), rows())


class Hyper(nn.Module):
    """One net makes the weights of another: a value that reached the unit through its own table of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.target = nn.Linear(W, W * W), nn.Linear(W, W)
        self.blocks = nn.ModuleList(nn.Linear(W, W) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = {"weight": self.maker(x.mean(0)).view(W, W), "bias": self.target.bias}
        x = torch.func.functional_call(self.target, made, (x,))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_a_unit_with_exchanged_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match=r"target is called with other parameters than its own"):
        trains(Hyper(), rows())


def test_parameters_without_a_shape_are_named() -> None:
    with pytest.raises(ModelError, match=r"2 parameters of Sequential have no shape yet \(1\.weight, 1\.bias\).*once"):
        penstock.Pipeline(nn.Sequential(nn.Linear(W, W), nn.LazyLinear(W)), stages=2, microbatches=2, loss_fn=square)


def test_a_unit_inside_of_vmap_is_refused_in_both_ways_and_works_the_other_way_round() -> None:
    class Mapped(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.vmap(block)(x)
            return x

    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(W, W)

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self.inner)(x)

    told = (
        r"replay: blocks\.0 is called inside of torch\.vmap.*put a module in its place.*\n.*graph: torch\.export cannot"
    )
    with pytest.raises(ModelError, match=told):
        trains(Mapped(), rows(), cut_options=CutOptions(method="auto"))
    assert trains(Chain(block=Maps), rows()) == 0.0


@pytest.mark.slow
def test_an_operator_that_compiles_itself_is_refused_with_a_remedy() -> None:
    """Flex attention is one of them: the error was dynamo's list of hundreds of skipped frames."""

    class Chooses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))

    class Choosing(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Chooses(W, W) for _ in range(4))

    with pytest.raises(
        ModelError, match=r"Choosing uses an operator that compiles itself .* attn_implementation='sdpa'"
    ):
        trains(Choosing(), rows())


class Routes(nn.Linear):
    """Experts as loops over the tokens that chose them: it can be run on values only, and returns flattened logits."""

    def __init__(self) -> None:
        super().__init__(W, W)
        self.register_buffer("preference", torch.linspace(0, 1, W))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        logits = super().forward(tokens)
        choice = (logits + self.preference).argmax(-1)
        result = torch.zeros_like(tokens)
        for expert in choice.unique().tolist():
            chosen = (choice == expert).nonzero().flatten()
            result = result.index_add(0, chosen, tokens[chosen] * logits[chosen, expert, None].sigmoid())
        return x + result.view_as(x), logits


class Routed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        every = []
        for block in self.blocks:
            x, logits = block(x)
            every.append(logits)
        return x.square().mean((1, 2)) + torch.cat(every).softmax(-1).amax(-1).mean()


def routed() -> float:
    torch.manual_seed(0)
    model, far = Routed(block=Routes), 0.0
    plain = copy.deepcopy(model)
    with piped(model, (rows(2, 6, W),)) as pipe:
        for length in (6, 9):
            x = rows(4, length, W)
            expected = sum(square(plain(part)).item() / 2 for part in x.chunk(2))
            far = max(far, abs(pipe.step(x).loss.item() / expected - 1))
    return far


@pytest.mark.slow
def test_a_unit_that_decides_by_values_runs_at_another_length_than_the_examples_on_processes() -> None:
    """Mixture of experts with `output_router_logits=True`: a process that does not have the unit ran it on zeros to
    learn the logits' shape, and took the zeros that it looked at for values that were missing; from the second step
    on it had no values of the unit's buffers either."""
    assert max(on_processes(2, routed)) < 1e-6


def trained_gpt(tied: bool, stages: int, schedule: str) -> tuple[float, list[int]]:
    torch.manual_seed(0)
    model, x, far = GPT(tied), batch(GPT), 0.0
    plain = copy.deepcopy(model)
    with piped(model, (x[:2],), stages=stages, schedule=schedule) as pipe:
        for _ in range(2):
            expected = 0.0
            for part in x.chunk(2):
                loss = square(plain(part)) / 2
                loss.backward()
                expected += loss.item()
            far = max(far, abs(pipe.step(x).loss.item() - expected))
            wanted = dict(plain.named_parameters())
            for name, gradient in ((name, each.grad) for name, each in pipe.named_parameters()):
                if gradient is not None:
                    far = max(far, (gradient - wanted[name].grad).abs().max().item())
        sizes = [0, 0]
        for part in pipe.deployment.staged.parts:
            rank = pipe.deployment.placement.rank_of(part.index)
            sizes[rank] += sum(value.numel() for value in part.module.parameters())
        return far, sizes


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (4, "zb-v")])
def test_a_list_of_blocks_inside_of_a_dict_is_taken_apart(stages: int, schedule: str, tied: bool) -> None:
    """The most copied GPT there is has its blocks in a list in a dict. The list was one unit, which nobody calls, so
    that its blocks were taken for glue: one stage had 4 % of the model and the other the rest, or both had all blocks.
    Gradients were exact all the while, and nothing was reported."""
    for far, sizes in on_processes(2, trained_gpt, tied, stages, schedule):
        assert far < 1e-6
        assert max(sizes) < 0.7 * sum(sizes)
