"""Running statistics of batch norms as if each batch had gone through in one piece, on both faces."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, PeerFailure, UsageError
from penstock.runtime.state.batch_norm import BATCH_NORMS, Deferred

ROWS, CHUNKS = 11, 4


def convolutions(momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, momentum=momentum, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(16, 3),
    ).double()


def images(step: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 2, 6, 6, generator=torch.Generator().manual_seed(step)).double() + step


def first_norm(model: nn.Module, x: Tensor) -> Tensor:
    """What reaches the first batch norm: of that, whole-batch statistics can be said without a normalisation before."""
    return model[0](x)  # type: ignore[index, no-any-return]


def plain_statistics(momentum: float | None, steps: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Of a batch norm that the whole batch goes through at once, for the model's first."""
    model, norm = convolutions(momentum), nn.BatchNorm2d(3, momentum=momentum).double()
    with torch.no_grad():
        for step in range(steps):
            norm(first_norm(model, images(step, rows)))
    return {name: value for name, value in norm.state_dict().items() if name not in ("weight", "bias")}


def assert_as_plain(norm: nn.Module, momentum: float | None, steps: int, rows: int = ROWS) -> None:
    found = norm.state_dict()
    for name, want in plain_statistics(momentum, steps, rows).items():
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("chunks", "rows", "checkpoint", "momentum"),
    by_turns(
        [(1, 11), (4, 11), (5, 10), (8, 6)],
        ["never", "except_last", "always"],
        [0.1, None],
        fast=[(1, 11, "always", 0.1), (4, 11, "except_last", None), (5, 10, "never", 0.1), (8, 6, "always", None)],
    ),
)
def test_gpipe_sees_each_batch_once(momentum: float | None, checkpoint: str, chunks: int, rows: int) -> None:
    """9 rows in 4 chunks made 3 pieces, and the statistics never moved. A biased variance."""
    options: dict[str, Any] = {"balance": [3, 5], "chunks": chunks, "checkpoint": checkpoint}
    model = convolutions(momentum)
    pipe = penstock.GPipe(model, batch_options=DEFERRED, **options)
    per_microbatch = convolutions(momentum)
    for step in range(2):
        y = pipe(images(step, rows))
        wanted = torch.cat([per_microbatch(piece) for piece in images(step, rows).tensor_split(min(chunks, rows))])
        assert torch.equal(y, wanted)  # normalised by microbatch, as ever
        y.sum().backward()
    assert_as_plain(model[1], momentum, 2, rows)
    assert model[4].num_batches_tracked == 2


DEFERRED = penstock.BatchOptions(batch_norm="deferred")
SCHEDULES = [("gpipe", 2), ("1f1b", 2), ("interleaved-1f1b", 4), ("zb-v", 4), ("looped-bfs", 4)]


@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_pipeline_sees_each_batch_once(schedule: str, stages: int, recompute: str) -> None:
    options: dict[str, Any] = {"schedule": schedule, "stages": stages, "recompute": recompute, "loss_fn": F.mse_loss}
    model = convolutions()
    with penstock.Pipeline(model, microbatches=CHUNKS, batch_options=DEFERRED, **options) as pipe:
        for step in range(2):
            pipe.step(images(step), target=torch.zeros(ROWS, 3).double())
            before = copy.deepcopy(pipe.state_dict())
            pipe.evaluate(images(9), target=torch.zeros(ROWS, 3).double())
            assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())
    assert_as_plain(model[1], 0.1, 2)


def test_parity_holds_for_it() -> None:
    options = {
        "stages": 2,
        "microbatches": CHUNKS,
        "loss_fn": F.mse_loss,
        "batch_options": DEFERRED,
    }
    x, target = images(0), torch.zeros(ROWS, 3).double()
    assert penstock.parity(convolutions(), x, target=target, pipeline={**options, "schedule": "gpipe"}).exact


class Residual(nn.Module):
    """No Sequential, and one norm that is called twice per batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.norm(self.first(x)))
        return self.norm(x) + y


def test_a_norm_that_is_called_twice_is_updated_twice_in_order() -> None:
    model, norm = Residual(), nn.BatchNorm1d(6).double()
    pipe = penstock.GPipe(model, stages=2, chunks=3, batch_options=DEFERRED)
    x = torch.randn(7, 6).double()
    with torch.no_grad():
        for each in (model.first(x), x):
            norm(each)
    pipe(x).sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(model.norm, name), getattr(norm, name), rtol=1e-12, atol=1e-12)


def test_statistics_move_without_gradients_too_and_not_in_eval_mode() -> None:
    model = convolutions()
    pipe = penstock.GPipe(model, balance=2, chunks=CHUNKS, batch_options=DEFERRED)
    with torch.no_grad():
        pipe(images(0))
    assert_as_plain(model[1], 0.1, 1)
    pipe.eval()
    pipe(images(1)).sum().backward()
    assert_as_plain(model[1], 0.1, 1)
    pipe.train()
    model[1].eval()  # one frozen norm among others
    pipe(images(1))
    assert_as_plain(model[1], 0.1, 1)
    assert model[4].num_batches_tracked == 2


def test_a_batch_that_fails_leaves_nothing_for_the_next() -> None:
    class Fails(nn.Module):
        on = True

        def forward(self, x: Tensor) -> Tensor:
            if self.on and penstock.current_microbatch() == 2:
                raise ValueError("here")
            return x

    fails, model = Fails(), convolutions()
    pipe = penstock.GPipe(nn.Sequential(*model, fails), balance=[3, 6], chunks=CHUNKS, batch_options=DEFERRED)
    with pytest.raises(ValueError, match="here"):
        pipe(images(5))
    fails.on = False
    for step in range(2):
        pipe(images(step))
    assert_as_plain(model[1], 0.1, 2)
    fails.on = True
    with (
        penstock.Pipeline(nn.Sequential(*model, fails), stages=2, microbatches=CHUNKS, loss_fn=F.mse_loss) as other,
        pytest.raises(PeerFailure, match="here"),
    ):
        other.step(images(5), target=torch.zeros(ROWS, 3).double())
    assert_as_plain(model[1], 0.1, 2)


def test_conversion_and_back_change_no_name_object_or_value() -> None:
    model = convolutions()
    before, layers = copy.deepcopy(model.state_dict()), list(model)
    hooked: list[int] = []
    model[1].register_forward_hook(lambda *_: hooked.append(1))
    assert penstock.defer_batch_norm(model) is model
    penstock.defer_batch_norm(model)
    assert list(model) == layers
    assert isinstance(model[1], nn.BatchNorm2d)
    assert type(model[1]).__name__ == "DeferredBatchNorm2d"
    assert list(model.state_dict()) == list(before)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(convolutions_deferred()))):
        assert isinstance(copied[1], Deferred)
        assert type(penstock.restore_batch_norm(copied)[1]) is nn.BatchNorm2d
    model(images(0))  # by itself it is a plain layer
    penstock.restore_batch_norm(model)
    assert [type(layer) for layer in model] == [type(layer) for layer in convolutions()]
    assert hooked == [1]
    assert_as_plain(model[1], 0.1, 1)


def convolutions_deferred() -> nn.Module:
    return penstock.defer_batch_norm(convolutions())


class OwnWay(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return input


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.SyncBatchNorm(4), "SyncBatchNorm, which has a forward"),
        (OwnWay(4), "OwnWay"),
        (nn.LazyBatchNorm1d(), "call it once"),
    ],
)
def test_a_norm_that_is_not_understood_is_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        penstock.defer_batch_norm(nn.Sequential(nn.Linear(4, 4), layer))


def test_wrong_options_are_named() -> None:
    with pytest.raises(UsageError, match=r"batch_norm='synced'\): choose one of 'microbatch', 'deferred'"):
        penstock.BatchOptions(batch_norm="synced")


def test_a_microbatch_of_one_value_says_what_to_do() -> None:
    pipe = penstock.GPipe(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), balance=[1, 1], chunks=4, batch_options=DEFERRED
    )
    with pytest.raises(ValueError, match="more than 1 value") as caught:
        pipe(torch.randn(4, 4))
    assert any("fewer microbatches" in note for note in caught.value.__notes__)


class Counts(nn.Module):
    """Counts rows, which add up over microbatches, and batches, which a layer has to tell from microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rows += x.shape[0]
            if penstock.current_microbatch() in (None, 0):
                self.batches += 1
        return x


def run_gpipe(model: nn.Module, x: Tensor, checkpoint: str) -> None:
    pipe = penstock.GPipe(model, balance=[2, 2], chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        pipe(x).sum().backward()
    pipe.eval()(x)
    pipe.train()


def run_pipeline(model: nn.Module, x: Tensor, recompute: str) -> None:
    with penstock.Pipeline(model, stages=2, microbatches=3, recompute=recompute, loss_fn=F.mse_loss) as pipe:
        for _ in range(2):
            pipe.step(x, target=x)
        pipe.evaluate(x, target=x)


@pytest.mark.parametrize("run", [run_gpipe, run_pipeline])
@pytest.mark.parametrize("again", ["never", "except_last", "always"])
def test_counters_count_what_the_plain_model_would(run: Callable[..., None], again: str) -> None:
    counts = Counts()
    model, x = nn.Sequential(nn.Linear(4, 4), counts, nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(7, 4)
    run(model, x, again)
    assert (int(counts.rows), int(counts.batches)) == (14, 2)


class Deep(nn.Module):
    """No Sequential, so it is cut by its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norms = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms:
            x = x + norm(x)
        return self.last(x)


def test_a_look_at_the_shape_of_what_another_stage_returns_is_no_batch() -> None:
    """The example has another number of rows: later stages ask once what the norms before them return."""
    torch.manual_seed(0)
    model, x = Deep().double(), torch.randn(8, 4).double()
    options: dict[str, Any] = {"batch_options": DEFERRED, "loss_fn": F.mse_loss}
    with penstock.Pipeline(model, stages=4, microbatches=2, example=(torch.randn(3, 4).double(),), **options) as pipe:
        pipe.step(x, target=x)
    wanted = nn.BatchNorm1d(4, momentum=None).double()
    wanted(model.norms[0][0](model.first(x)))  # type: ignore[index]
    for name, value in wanted.named_buffers():
        torch.testing.assert_close(model.norms[0][1].get_buffer(name), value, msg=name)  # type: ignore[index]


def test_a_model_with_batch_norms_that_see_microbatches_warns_when_the_pipeline_is_made() -> None:
    """Gradients were not those of the plain loop on whole batches, without a word."""
    with pytest.warns(UserWarning, match=r"3 batch norm layers \(1, 4, 5\) see one microbatch at a time") as caught:
        pipe = penstock.Pipeline(convolutions(), stages=2, microbatches=4, loss_fn=F.cross_entropy)
    pipe.close()
    assert caught[0].filename == __file__
    assert "batch_norm='exact') with schedule='gpipe'" in str(caught[0].message)
    frozen = convolutions()
    for layer in frozen:
        layer.train(not isinstance(layer, nn.BatchNorm2d))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for how in BATCH_NORMS:
            options = penstock.BatchOptions(batch_norm=how)
            penstock.Pipeline(convolutions(), stages=2, microbatches=4, schedule="gpipe", batch_options=options).close()
        penstock.Pipeline(convolutions(), stages=2, microbatches=1).close()
        penstock.Pipeline(frozen, stages=2, microbatches=4).close()
        penstock.Pipeline(penstock.defer_batch_norm(convolutions()), stages=2, microbatches=4).close()


def test_exact_batch_norms_name_the_schedules_that_they_need_when_the_pipeline_is_made() -> None:
    options = penstock.BatchOptions(batch_norm="exact")
    with pytest.raises(UsageError, match=r"1f1b rank 0 runs .* use a schedule that runs all forwards first \(gpipe, "):
        penstock.Pipeline(convolutions(), stages=2, microbatches=4, loss_fn=F.cross_entropy, batch_options=options)
