"""Mixed precision: what is under autocast and what is not, and loss scaling that all ranks agree on.

One group of three processes runs all scenarios; each returns what its rank saw, and the tests look at that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from processes import on_processes
from runtime.optim.half_blocks import COUNT, WIDTH, Spy, batch, piped, stages
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError, UsageError

Ranks = list[dict[str, Any]]


class Unrolled(nn.Module):
    """Its weight is used many times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(12):
            x = x + torch.tanh(self.linear(x))
        return x


def plain_step(model: nn.Module, step: int, dtype: torch.dtype | None, scale: float = 1.0) -> Tensor:
    """Gradient accumulation on one device; returns the batch's loss."""
    total = torch.zeros(())
    x, y = batch(step)
    for part, goal in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
        with torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext():
            loss = F.mse_loss(model(part), goal)
        loss.backward(torch.tensor(1 / COUNT, dtype=torch.float64).to(loss) * scale)
        total = total + loss.detach() * torch.tensor(1 / COUNT, dtype=torch.float64).to(loss)
    return total


def plainly(dtype: torch.dtype) -> dict[str, Any]:
    """Two steps with an optimizer."""
    model = nn.Sequential(*stages())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(2):
        losses.append(plain_step(model, step, dtype))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        loss = F.mse_loss(model(batch()[0]), batch()[1])
    return {"losses": losses, "state": model.state_dict(), "evaluated": loss}


def trained(around: bool, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """The same two steps, with the option, or all of it under the caller's own autocast."""
    Spy.seen.clear()
    losses = []
    outer = torch.autocast("cpu", dtype=dtype) if around else nullcontext()
    with outer, piped(precision=None if around else dtype, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            x, y = batch(step)
            losses.append(pipe.step(x, target=y).loss)
            optimizer.step()
            optimizer.zero_grad()
        seen = sorted(set(Spy.seen))
        x, y = batch()
        evaluated = pipe.evaluate(x, target=y).loss
        output = pipe.predict(x)
        still = torch.is_autocast_enabled("cpu") == around
        return {
            "losses": losses,
            "state": {name: value.clone() for name, value in pipe.state_dict().items()},
            "seen": seen,
            "evaluated": evaluated,
            "output": None if output is None else output.dtype,
            "came": {dtype for module in pipe.deployment.ranks.modules().values() for dtype in module.came},
            "still": still,
        }


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def scaled(bad_step: int, owner: str) -> dict[str, Any]:
    """Four steps in float16; in one of them, one rank's gradient is inf."""
    with piped(precision="fp16") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
        scaler = penstock.GradScaler(pipe, init_scale=1024.0, growth_interval=2)
        seen: dict[str, list[Any]] = {"losses": [], "scales": [], "norms": [], "states": []}
        for step in range(4):
            x, y = batch(step)
            seen["losses"].append(pipe.step(x, target=y).loss)
            for name, parameter in pipe.named_parameters():
                if step == bad_step and name == owner and parameter.grad is not None:
                    parameter.grad.view(-1)[0] = math.inf
            scaler.unscale_(optimizer)
            seen["norms"].append(pipe.clip_grad_norm_(0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen["scales"].append(scaler.get_scale())
            seen["states"].append({name: value.clone() for name, value in pipe.state_dict().items()})
        return {**seen, "scaler": scaler.state_dict()}


def scaled_plainly(bad_step: int, owner: str) -> dict[str, Any]:
    """torch's own, on one device."""
    model = nn.Sequential(*stages())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen: dict[str, list[Any]] = {"losses": [], "scales": [], "norms": [], "states": []}
    for step in range(4):
        scaler.scale(torch.zeros(()))
        seen["losses"].append(plain_step(model, step, torch.float16, scaler.get_scale()))
        if step == bad_step:
            dict(model.named_parameters())[owner].grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        seen["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen["scales"].append(scaler.get_scale())
        seen["states"].append({name: value.clone() for name, value in model.state_dict().items()})
    return {**seen, "scaler": scaler.state_dict()}


def attempt(function: Callable[[], Any]) -> tuple[type, str]:
    try:
        function()
    except PenstockError as error:
        return type(error), str(error)
    return type(None), "no error"


def apart(rank: int) -> dict[str, Any]:
    """Ranks that were given different precisions, or scalers that do not agree."""

    def different() -> None:
        piped(precision="bf16" if rank == 1 else "fp16")

    def scales() -> None:
        with piped(precision="fp16") as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            scaler = penstock.GradScaler(pipe, init_scale=2.0 if rank == 1 else 4.0)
            pipe.step(batch()[0], target=batch()[1])
            scaler.step(optimizer)

    return {"different": attempt(different), "scales": attempt(scales)}


def on_a_rank() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    return {
        "option": trained(False, torch.bfloat16),
        "around": trained(True, torch.bfloat16),
        "fp16": trained(False, torch.float16, transport="distributed"),
        "recompute": trained(True, torch.bfloat16, recompute="always"),
        "scaled": scaled(1, "0.linear.weight"),
        "apart": apart(rank),
    }


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    found: Ranks = on_processes(3, on_a_rank)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert [loss.item() for loss in found["losses"]] == [loss.item() for loss in expected["losses"]]
    for name, value in found["state"].items():
        assert torch.equal(value, expected["state"][name]), name


@pytest.mark.parametrize(
    ("name", "around", "options"),
    [
        ("option", False, {"dtype": torch.bfloat16}),
        ("around", True, {"dtype": torch.bfloat16}),
        ("fp16", False, {"dtype": torch.float16, "schedule": "gpipe"}),
        ("recompute", True, {"dtype": torch.bfloat16, "recompute": "always", "schedule": "zb-h1"}),
    ],
)
def test_two_steps_have_the_bits_of_autocast_on_one_device(
    name: str, around: bool, options: dict[str, Any], ranks: Ranks
) -> None:
    dtype = options["dtype"]
    expected = plainly(dtype)
    for found in [trained(around, **options), *(rank[name] for rank in ranks)]:
        assert_same(found, expected)
        assert found["seen"] == [("backward", False), ("forward", True)]  # recompute's forwards too
        torch.testing.assert_close(found["evaluated"], expected["evaluated"])
        assert found["still"]  # what the caller had is on again
        assert found["came"] <= {torch.float32, dtype}
    assert {found for rank in ranks for found in rank[name]["came"]} == {torch.float32, dtype}  # as it comes out
    assert [rank[name]["output"] for rank in ranks] == [None, None, dtype]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
@pytest.mark.parametrize("precision", ["bf16", "FP16", torch.float32])
def test_parity_holds_in_any_precision(schedule: str, precision: Any) -> None:
    x, y = batch()
    options = {"microbatches": 3, "schedule": schedule, "loss_fn": F.mse_loss, "precision": precision}
    assert penstock.parity(stages(), x, target=y, pipeline=options).exact


@pytest.mark.slow
def test_a_model_that_is_cut_by_replay_or_graph_follows() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(torch.relu(self.first(x)))
            return out

    x, y = batch()
    for split in ("replay", "graph"):
        options = {
            "stages": 2,
            "microbatches": 2,
            "example": (x[:2],),
            "cut_options": penstock.CutOptions(method=split),
            "loss_fn": F.mse_loss,
            "precision": "bf16",
        }
        assert penstock.parity(Whole(), x, target=y, pipeline=options).exact
        with penstock.Pipeline(Whole(), **options) as pipe:
            assert pipe.predict(x).dtype is torch.bfloat16


@pytest.mark.slow
def test_a_hugging_face_model_has_the_bits_of_autocast() -> None:
    """Rotary embeddings leave autocast inside the forward."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes))
    ids = torch.randint(0, 50, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    example = {name: value[:2] for name, value in batch.items()}
    for schedule in ("1f1b", "zb-h1"):
        options = {"stages": 4, "microbatches": 4, "schedule": schedule, "example": example, "precision": "bf16"}
        assert penstock.parity(model, **batch, pipeline=options).exact


def test_full_precision_can_be_had_under_the_callers_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), piped(precision="fp32") as pipe:
        assert pipe.predict(batch()[0]).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_dtype_needs_no_option(dtype: torch.dtype) -> None:
    model = [stage.to(dtype) for stage in stages()]
    x, y = (value.to(dtype) for value in batch())
    options = {"microbatches": 2, "loss_fn": F.mse_loss, "schedule": "1f1b"}
    assert penstock.parity(model, x, target=y, pipeline=options).exact


def test_weights_that_are_used_often_give_the_same_bits_in_every_run() -> None:
    def gradients() -> list[Tensor]:
        with piped(stages(Unrolled), microbatches=6) as pipe:
            pipe.step(batch()[0], target=batch()[1])
            return [p.grad.clone() for p in pipe.parameters() if p.grad is not None]

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, gradients(), strict=True))


@pytest.mark.parametrize("keeps", [True, False])
def test_casts_of_weights_live_for_a_step_or_for_one_use(keeps: bool) -> None:
    seen = []

    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(torch.is_autocast_cache_enabled())
            return super().forward(input)

    with piped([Looks(WIDTH, WIDTH), Looks(WIDTH, WIDTH)]) as pipe:
        pipe.deployment.ranks.keeps_casts = keeps  # not where weights are gathered for a part of the step
        pipe.step(batch()[0], target=batch()[1])
    assert set(seen) == {keeps}
    assert torch.is_autocast_cache_enabled()


def test_a_failed_step_leaves_autocast_as_it_was() -> None:
    with piped([nn.Linear(WIDTH, WIDTH), Fails()]) as pipe, torch.autocast("cpu", dtype=torch.float16):
        with pytest.raises(PenstockError, match="ValueError: no"):
            pipe.step(batch()[0], target=batch()[1])
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16


@pytest.mark.parametrize("precision", ["int8", torch.float64, 16, True])
def test_another_precision_is_refused(precision: Any) -> None:
    with pytest.raises(UsageError, match="choose 'bf16', 'fp16' or 'fp32'"):
        piped(precision=precision)


def test_ranks_with_different_precision_are_refused(ranks: Ranks) -> None:
    for rank in ranks:
        kind, text = rank["apart"]["different"]
        assert kind is UsageError
        assert "precision: rank 1 has torch.bfloat16, rank 0 has torch.float16" in text


# -- loss scaling


@pytest.mark.parametrize("bad_step", [1, 9])
def test_no_rank_steps_where_one_found_inf(bad_step: int, ranks: Ranks) -> None:
    owner = "0.linear.weight"
    expected = scaled_plainly(bad_step, owner)
    runs = [scaled(bad_step, owner)] + ([rank["scaled"] for rank in ranks] if bad_step == 1 else [])
    for found in runs:
        assert found["scales"] == expected["scales"]
        assert found["scaler"] == expected["scaler"]
        assert [loss.item() for loss in found["losses"]] == [loss.item() for loss in expected["losses"]]  # unscaled
        for norm, wanted in zip(found["norms"], expected["norms"], strict=True):
            torch.testing.assert_close(norm, wanted)
        for state, whole in zip(found["states"], expected["states"], strict=True):
            for name, value in state.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)
        if bad_step == 1:
            assert all(torch.equal(value, found["states"][0][name]) for name, value in found["states"][1].items())
            assert found["scales"][:2] == [1024.0, 512.0]
    assert any(not torch.equal(value, runs[0]["states"][2][name]) for name, value in runs[0]["states"][3].items())


def test_scales_that_differ_are_an_error_on_every_rank(ranks: Ranks) -> None:
    for rank in ranks:
        kind, text = rank["apart"]["scales"]
        assert kind is UsageError
        assert "rank 0: 4, rank 1: 2, rank 2: 4" in text
