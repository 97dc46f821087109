"""Cuts by position: what they may leave out, which is nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import CutOptions
from penstock.errors import ModelError, PenstockError
from penstock.model.by_position import split_by_position
from penstock.model.cut import cut_model

WIDTH = 4


class Shifted(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + 1
        return out


class Named(nn.Sequential):
    """A subclass that only builds its layers is an nn.Sequential like any other."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def layers(kind: Any = nn.Sequential) -> Any:
    torch.manual_seed(0)
    return kind(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def hooked(register: str) -> Any:
    model = layers()
    hooks: dict[str, Any] = {
        "register_forward_hook": lambda module, inputs, output: output * 3,
        "register_forward_pre_hook": lambda module, inputs: (inputs[0] * 3,),
        "register_full_backward_hook": lambda module, inputs, outputs: None,
        "register_full_backward_pre_hook": lambda module, outputs: None,
    }
    getattr(model, register)(hooks[register])
    return model


HOOKS = ["register_forward_hook", "register_forward_pre_hook"]
BACKWARD = ["register_full_backward_hook", "register_full_backward_pre_hook"]


@pytest.mark.parametrize("split", ["auto", "position"])
def test_a_forward_of_its_own_is_not_cut_by_position(split: str) -> None:
    """A2: its layers were taken and its forward was not."""
    with pytest.raises(ModelError, match=r"Shifted has a forward of its own, .* pass example=\(x,\)"):
        cut_model(layers(Shifted), 2, options=CutOptions(method=split))


@pytest.mark.parametrize("register", HOOKS + BACKWARD)
def test_hooks_on_the_container_are_not_cut_away(register: str) -> None:
    """A3: nobody called the container any more."""
    with pytest.raises(ModelError, match="the Sequential has hooks on itself"):
        split_by_position(hooked(register), 2, None)


def test_a_forward_put_on_the_object_counts() -> None:
    model = layers()
    model.forward = lambda x: x
    with pytest.raises(ModelError, match="has a forward of its own"):
        split_by_position(model, 2, None)


def test_a_list_with_a_forward_is_a_model_and_no_list_of_stages() -> None:
    class Running(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)
            return x

    model = Running([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    with pytest.raises(ModelError, match="Running has a forward of its own"):
        cut_model(model, 2)
    assert cut_model(model, 2, example=(torch.randn(2, WIDTH),)).stages == 2


def test_a_subclass_without_one_and_hooks_on_layers_are_cut_as_ever() -> None:
    model = Named()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    x = torch.randn(2, WIDTH)
    first, second = split_by_position(model, 2, None).parts
    assert torch.equal(_through(first, second, x), model(x))


def _through(first: Any, second: Any, x: Tensor) -> Any:
    return second.run({0: first.run({}, (x,), {})[1]}, (), {})[-1]


@pytest.mark.parametrize("make", [lambda: layers(Shifted), *((lambda name=name: hooked(name)) for name in HOOKS)])
def test_with_an_example_they_go_by_their_forward(make: Any) -> None:
    model, x, y = make(), torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    wanted = torch.stack([F.mse_loss(model(a), b) for a, b in zip(x.split(2), y.split(2), strict=True)]).detach()
    with penstock.Pipeline(model, stages=2, microbatches=4, loss_fn=F.mse_loss, example=(x[:2],)) as pipe:
        torch.testing.assert_close(pipe.step(x, target=y).loss, wanted.mean())


def test_layers_of_a_sequential_are_named_without_an_example() -> None:
    model = nn.Sequential(*layers(), nn.Sequential(), nn.Tanh())  # an empty layer is a layer
    x = torch.randn(6, WIDTH)
    with penstock.Pipeline(model, split_at=["1", "3"], microbatches=2, loss_fn=F.mse_loss) as pipe:
        assert pipe.deployment.staged.how == "nn.Sequential by position, layers per stage: 1, 2, 3"
        assert torch.equal(pipe.predict(x), torch.cat([model(half) for half in x.split(3)]))
        assert pipe.step(x, target=x).loss is not None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"split_at": ["2"], "stages": 3}, "split_at has 1 names, which make 2 stages, not 3"),
        ({"split_at": ["3", "1"]}, "is not in the order in which the model calls its layers"),
        ({"split_at": ["1", "1"]}, "is not in the order"),
        ({"split_at": ["0"]}, "the stage before '0' would have no layer"),
        ({"split_at": ["9"]}, r"needs one input to look at: pass example=\(x,\)"),
    ],
)
def test_names_that_do_not_cut_its_layers(options: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        penstock.Pipeline(layers(), microbatches=2, loss_fn=F.mse_loss, **options)


def test_names_do_not_go_round_a_forward_of_its_own() -> None:
    with pytest.raises(ModelError, match="has a forward of its own"):
        penstock.Pipeline(layers(Shifted), split_at=["2"], microbatches=2, loss_fn=F.mse_loss)


def test_what_hangs_on_the_container_itself_is_owned_too() -> None:
    """No layer reads it, so no loss shows that it was left out of the state."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    with penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=F.mse_loss) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
        assert set(pipe.state_dict()) == set(model.state_dict())
        assert {name for name, _ in pipe.named_parameters()} == {name for name, _ in model.named_parameters()}
        assert {name for name, _ in pipe.named_buffers()} == {"mean", "cache"}
        pipe.load_state_dict(model.state_dict())


class Mean(nn.Module):
    """Moves a buffer at each call; or, where it does not move, only reads it."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.scale, self.moves = nn.Parameter(torch.ones(4)), moves
        self.register_buffer("mean", torch.full((4,), torch.nan) if not moves else torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves and self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * self.scale


@pytest.mark.parametrize("face", ["list", "sequential", "gpipe"])
def test_one_layer_in_two_stages_may_have_buffers_and_not_change_them(face: str) -> None:
    """On processes each rank had its own, and on threads they moved in another order than plainly."""
    x = torch.randn(4, 4)

    def run(moves: bool, balance: list[int], training: bool = True) -> None:
        mean = Mean(moves).train(training)
        layers = [mean, nn.Linear(4, 4), nn.Linear(4, 4), mean]
        if face == "gpipe":
            penstock.GPipe(nn.Sequential(*layers), balance=balance, chunks=2)(x).sum().backward()
            return
        options: dict[str, Any] = {"microbatches": 2, "loss_fn": F.mse_loss, "recompute": "always"}
        if face == "list":
            model: Any = [nn.Sequential(*layers[: balance[0]]), nn.Sequential(*layers[balance[0] :])]
        else:
            model, options["balance"] = nn.Sequential(*layers), balance
        with penstock.Pipeline(model, **options) as pipe:
            pipe.step(x, target=x)

    with pytest.raises(PenstockError, match=r"(?s)have one Mean, which changes its buffer .*mean at each call"):
        run(True, [2, 2])
    run(False, [2, 2])
    run(True, [2, 2], training=False)


@pytest.mark.parametrize("as_list", [False, True])
def test_one_batch_norm_in_two_stages_is_refused(as_list: bool) -> None:
    """Its running statistics were another on every run, and on processes each rank had its own."""
    norm = nn.BatchNorm1d(4)
    layers = [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm]
    model: Any = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])] if as_list else nn.Sequential(*layers)
    options: dict[str, Any] = {"microbatches": 2, "loss_fn": F.mse_loss}
    options |= {} if as_list else {"stages": 2}
    with pytest.raises(ModelError, match=r"layers (0\.)?1 and (1\.1|3) are one batch norm, on stages 0 and 1"):
        penstock.Pipeline(model, **options)
    norm.eval()
    penstock.Pipeline(model, **options).close()
    norm.train()
    if not as_list:
        penstock.Pipeline(model, microbatches=2, loss_fn=F.mse_loss, balance=[1, 3]).close()
