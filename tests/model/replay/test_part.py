"""What a user meets who cuts a model by replay: names, states, errors, a model left alone, and the self-check."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model import nets
from model.nets import Chain, W, rows, square
from tiers import mostly_slow
from torch import Tensor, nn

import penstock
from penstock import BatchOptions, CutOptions
from penstock.errors import ModelError, ParityError, UsageError
from penstock.model.replay import plan


def piped(model: nn.Module, x: Tensor, **options: Any) -> penstock.Pipeline:
    options = {
        "microbatches": 2,
        "loss_fn": square,
        "cut_options": penstock.CutOptions(method="replay"),
        "example": (x[:2],),
        **options,
    }
    return penstock.Pipeline(model, **options)


def test_the_users_model_is_as_before_and_trains_plain_afterwards() -> None:
    torch.manual_seed(0)
    model, x = nets.UNet(), torch.randn(4, 2, 8, 8)
    twin = copy.deepcopy(model)
    before = [(id(module), type(module), set(module.__dict__), module.training) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    with piped(model, x, stages=2), piped(model, x, stages=4):
        pass
    assert torch.equal(generator, torch.get_rng_state())
    assert before == [(id(m), type(m), set(m.__dict__), m.training) for m in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    for each in (model, twin):
        square(each(x)).backward()
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("net", mostly_slow([nets.UNet, nets.ResNet], nets.ResNet))
def test_a_state_goes_from_two_stages_to_four_and_back_to_the_model(net: type[nn.Module]) -> None:
    x = torch.randn(4, 2, 8, 8)
    with piped(net(), x, stages=2) as two, piped(net(), x, stages=4, schedule="zb-v") as four:
        two.step(x)
        four.load_state_dict(two.state_dict())
        plain = net()
        plain.load_state_dict(four.state_dict())
        assert set(two.state_dict()) == set(plain.state_dict())
        assert all(torch.equal(value, two.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_parameter_and_buffer_is_owned(stages: int) -> None:
    model, x = nets.ResNet(), torch.randn(4, 2, 8, 8)
    with piped(model, x, stages=stages) as pipe:
        names = [name for part in pipe.deployment.staged.parts for name in part.names.values()]
        assert sorted(names) == sorted({*dict(model.named_parameters()), *dict(model.named_buffers())})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 9}, r"calls units with parameters 4 times .*too few for 9 stages; pass stages=4 or fewer"),
        ({"split_at": ["blocks.7"]}, r"no unit 'blocks\.7'.*near: .*blocks\."),
        ({"split_at": ["nothing"]}, r"no unit 'nothing'.*units: blocks\.0"),
        ({"split_at": ["blocks.2", "blocks.1"]}, "not in the order"),
        ({"split_at": ["blocks.0"]}, r"the stage before 'blocks\.0' would have no unit"),
        ({"stages": 2, "balance": [3, 3]}, "sums to 6"),
        ({"stages": 2, "example": None}, "pass example="),
    ],
)
def test_bad_input_is_told_what_is_wrong_and_what_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        piped(Chain(), torch.randn(4, W), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, r"stages=0: pass a whole number, at least 1"),
        ({"example": torch.ones(2, W)}, r"example=a Tensor of shape \(2, 8\): .* as a tuple, such as \(x,\)"),
        ({"example": (torch.ones(2, 3),)}, r"example=: Chain cannot be run on it \(RuntimeError: mat1 and mat2"),
        ({"example": {"y": torch.ones(2, W)}}, r"example=: .*unexpected keyword argument 'y'.*as the model takes them"),
        ({"split_at": "blocks.2", "stages": None}, r"split_at='blocks\.2': pass a list"),
        ({"split_at": ["blocks.2"], "balance": [2, 2]}, r"both say where to cut; leave one"),
        ({"balance": [2.0, 2.0]}, r"balance=\[2\.0, 2\.0\]: .*whole numbers"),
        ({"balance": {"blocks.0": "heavy"}}, r"balance=.*heavy"),
    ],
)
def test_slips_in_the_arguments_are_named_and_no_graph_is_tried(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        piped(Chain(), torch.randn(4, W), **{"stages": 2, "cut_options": penstock.CutOptions(method="auto"), **options})


@pytest.mark.parametrize(("model", "split"), [(Chain, "auto"), (len, "replay")])
def test_what_is_no_model_is_named(model: Any, split: str) -> None:
    with pytest.raises(UsageError, match=r"pass an nn\.Module, or a list of stage modules"):
        piped(model, torch.randn(4, W), stages=2, cut_options=CutOptions(method=split))


def test_a_model_without_parameters_or_that_calls_none_of_its_modules_is_told_so() -> None:
    class Calls(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with pytest.raises(ModelError, match="Identity has no parameters; there is nothing to cut"):
        piped(nn.Identity(), torch.randn(4, W), stages=2)
    with pytest.raises(ModelError, match=r"Calls's forward calls none of its modules .*nowhere to cut"):
        piped(Calls(), torch.randn(4, W), stages=2)


def test_a_proposal_and_a_timeline_are_what_they_say() -> None:
    with piped(Chain(), torch.randn(4, W), stages=2) as pipe:
        with pytest.raises(UsageError, match=r"nothing was measured with this cut.*record"):
            pipe.rebalance()
        with pytest.raises(UsageError, match=r"timeline=3: pass what .*record"):
            pipe.rebalance(3)  # type: ignore[arg-type]
        with pipe.record() as timeline:
            pipe.step(torch.randn(4, W))
        assert pipe.rebalance() == pipe.rebalance(timeline)
        with pytest.raises(UsageError, match=r"proposal=\[1, 3\]: pass what pipe\.rebalance"):
            pipe.apply([1, 3])  # type: ignore[arg-type]


def test_split_at_names_the_first_unit_of_each_further_stage() -> None:
    with piped(Chain(), torch.randn(4, W), split_at=["blocks.1", "blocks.3"]) as pipe:
        owned = [
            sorted({name.rpartition(".")[0] for name in part.names.values()}) for part in pipe.deployment.staged.parts
        ]
        assert owned == [["blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3"]]


@pytest.mark.slow
def test_a_compiled_unit_trains_as_an_eager_one() -> None:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(4, W)
    plain = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with piped(model, x, stages=2) as pipe:
        pipe.step(x)
        for part in x.chunk(2):
            (square(plain(part)) / 2).backward()
        found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def check(model: nn.Module, x: Tensor, **options: Any) -> Any:
    options = {
        "microbatches": 2,
        "loss_fn": square,
        "cut_options": penstock.CutOptions(method="replay"),
        "example": (x[:2],),
        **options,
    }
    return penstock.parity(model, x, pipeline=options)


@pytest.mark.parametrize(("stages", "schedule"), mostly_slow([(2, "1f1b"), (4, "zb-v")], (2, "1f1b")))
def test_parity_compares_with_the_uncut_model(stages: int, schedule: str) -> None:
    assert check(nets.UNet(), torch.randn(4, 2, 8, 8), stages=stages, schedule=schedule).exact
    assert check(nets.Tied(), torch.randint(0, 20, (4, 5)), stages=stages, schedule=schedule).gradient < 1e-5


def test_parity_finds_a_dependency_that_the_plan_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins are poisoned on one side: what depends on one after all is NaN there."""

    class Skips(Chain):
        def forward(self, x: Tensor) -> Tensor:
            first = self.blocks[0](x)
            y = torch.tanh(self.blocks[2](torch.tanh(self.blocks[1](first))))
            out: Tensor = self.blocks[3](y + first)
            return out

    real = plan.plan_stages

    def forgetful(recording: Any, cuts: Any) -> Any:
        if cuts:
            last = recording.calls[-1]
            last.needs = frozenset(mark for mark in last.needs if mark[0] != 0)
        return real(recording, cuts)

    monkeypatch.setattr("penstock.model.replay.cut.plan_stages", forgetful)
    with pytest.raises(ParityError, match="differ by nan"):
        check(Skips(), torch.randn(4, W), stages=2, balance=[2, 2])


class Grows(nn.Module):
    """Makes a layer when it is first called, on itself or on the model around it."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.late = own, None
        self.first, self.last = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        holder = self if self.own else self.first
        if getattr(holder, "late", None) is None:
            holder.late = nn.Linear(W, W)
        out: Tensor = self.last(holder.late(self.first(x)))
        return out


@pytest.mark.filterwarnings("ignore::penstock.errors.CutWarning")  # a layer of three is in both stages
@pytest.mark.parametrize("own", [False, True])
def test_parameters_made_in_the_forward_are_not_lost_in_silence(own: bool) -> None:
    model, x = Grows(own), rows()
    with pytest.raises(
        UsageError, match=r"Grows makes parameters in its forward \((first\.)?late\.weight.*run the model"
    ):
        piped(model, x, stages=2)
    assert model.late is None
    model(x)
    with piped(model, x, stages=2) as pipe:
        assert pipe.step(x).loss > 0
        assert set(pipe.state_dict()) == set(model.state_dict())


class Encodes(nn.Module):
    """torch's encoder goes over to nested tensors where it evaluates on padded rows; the head has a scripted ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(W, 2, W, 0.0, batch_first=True), 3)
        with pytest.warns(DeprecationWarning, match="script"):
            self.head = torch.jit.script(nn.Sequential(nn.Linear(W, W), nn.ReLU()))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return out


def test_torchs_encoder_evaluates_padded_rows() -> None:
    torch.manual_seed(0)
    model, x = Encodes(), rows(4, 3, W)
    padding = torch.arange(3) >= torch.tensor([[3], [2], [1], [2]])
    with piped(model, x, stages=3, example=(x[:2], padding[:2])) as pipe:
        pipe.step(x, padding)
        output = pipe.predict(x, padding)
        again = pipe.predict(x, padding)  # no longer followed from operation to operation
        assert torch.equal(output, again)
    model.eval()
    torch.testing.assert_close(output[~padding], model(x, padding)[~padding].detach())


def test_a_scripted_norm_is_not_moved_by_the_look_at_the_example() -> None:
    model = Chain(3)
    with pytest.warns(DeprecationWarning, match="script"):
        model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W)))
    x = rows()
    with piped(model, x, stages=2) as pipe:
        assert pipe.state_dict()["blocks.1.1.num_batches_tracked"] == 0
        pipe.step(x)
        pipe.evaluate(x)
        assert pipe.state_dict()["blocks.1.1.num_batches_tracked"] == 2
    with pytest.raises(ModelError, match=r"blocks\.1\.1 is scripted and stays as it is"):
        piped(model, x, stages=2, batch_options=BatchOptions(batch_norm="deferred"))
