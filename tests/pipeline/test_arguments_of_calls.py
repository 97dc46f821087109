"""Slips in a call are told in a sentence with a remedy, and not as a TypeError in code of others."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import BatchOptions
from penstock.errors import ModelError, PeerFailure, PenstockError, UsageError

X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.two(self.one(x))
        return x if scale is None else x * scale


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.mean(0) for row in self.linear(x).unbind()])


def pipeline(model: Any = None, **options: Any) -> penstock.Pipeline:
    given = {"stages": 2, "microbatches": 2, "loss_fn": F.mse_loss, **options}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model
    return penstock.Pipeline(model, **given)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.MSELoss, r"loss_fn is the class MSELoss; pass an instance: loss_fn=MSELoss\(\)"),
        (lambda output: output.mean(), r"loss_fn is called as loss_fn\(output, target, \*\*loss_kwargs\), but"),
        (nn.MSELoss(reduction="none"), "reduction='none', but must return one number"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_at_once(loss_fn: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pipeline(loss_fn=loss_fn)


def test_what_a_loss_needs_beside_the_target_is_named() -> None:
    def weighted(output: Tensor, target: Tensor, weight: float) -> Tensor:
        return F.mse_loss(output, target) * weight

    with pytest.raises(
        UsageError, match=r"missing a required argument: 'weight'; pass what it needs by name in loss_kw"
    ):
        pipeline(loss_fn=weighted).step(X, target=Y)
    with pytest.raises(UsageError, match="unexpected keyword argument 'wait'"):
        pipeline(loss_fn=weighted).step(X, target=Y, loss_kwargs={"weight": 1.0, "wait": 2.0})


def test_targets_that_are_forgotten_or_passed_by_position() -> None:
    with pytest.raises(UsageError, match=r"step\(\) was passed no target, but loss_fn mse_loss needs one"):
        pipeline().step(X)
    with pytest.raises(
        UsageError, match=r"2 positional arguments, but the model takes 1 \(input\); the target goes by na"
    ):
        pipeline().step(X, Y)
    with pytest.raises(PeerFailure, match=r"ModelError: .* raised TypeError .*: step\(\) got no target on this rank"):
        pipeline(loss_fn=lambda output, target: (output - target).square().mean()).step(X)


def test_a_target_of_another_kind() -> None:
    with pytest.raises(PeerFailure, match=r"the target is torch.int32, the output torch.float32; convert it"):
        pipeline(loss_fn=F.cross_entropy).step(X, target=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(PeerFailure, match=r"the target is torch.bool, .*target.float\(\) for values"):
        pipeline(loss_fn=nn.BCEWithLogitsLoss()).step(X, target=Y > 0)
    with pytest.raises(PeerFailure, match=r"the target is torch.int64, .*target.float\(\) for values"):
        pipeline(loss_fn=nn.BCEWithLogitsLoss()).step(X, target=Y.long())
    with pytest.raises(PeerFailure, match=r"the target is on meta, the output on cpu; move it with target.to"):
        pipeline().step(X, target=Y.to("meta"))


def test_targets_and_outputs_that_are_no_tensors() -> None:
    with pytest.raises(PeerFailure, match="the target is a list without tensors; pass a tensor"):
        pipeline().step(X, target=Y.tolist())
    with pytest.raises(PeerFailure, match="the output is a tuple; pass a loss_fn that takes of it what the loss is of"):
        pipeline(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))).step(X, target=Y)
    with pytest.raises(
        ModelError, match=r"keyword argument 'labels'; stages take input \(what loss_fn needs goes by tar"
    ):
        pipeline().step(X, labels=Y)


def test_rows_that_cannot_be_cut_are_refused_by_name() -> None:
    """An array went to every microbatch whole; nested and sparse tensors were an error of torch's without a name."""
    pieces = [torch.nested.nested_tensor([row[None]] * 4, layout=torch.jagged) for row in X[:2]]
    nested = torch.nested.nested_tensor([row[None] for row in X], layout=torch.jagged)
    with pytest.raises(ModelError, match=r"'target' is or holds a numpy array of shape \(8, 4\), .*torch.from_numpy"):
        pipeline().step(X, target=Y.numpy())
    with pytest.raises(
        ModelError, match=r"argument 0 is or holds a nested tensor.*penstock.Microbatches\(\[one nested"
    ):
        pipeline().step(nested, target=Y)
    with pytest.raises(ModelError, match=r"argument 0 is or holds a tensor with layout torch.sparse_coo"):
        pipeline().step(X.to_sparse(), target=Y)
    pipeline([Pooled(), nn.Linear(4, 4)]).step(penstock.Microbatches(pieces), target=Y)


def test_a_batch_that_is_a_dict_is_to_be_unpacked() -> None:
    pipe = pipeline(Scaled(), example=(X,))
    with pytest.raises(UsageError, match=r"a dict with 'x' in it.*step\(\*\*batch\)"):
        pipe.step({"x": X, "scale": None}, target=Y)
    pipe.step(**{"x": X}, target=Y)


def test_a_batch_that_waits_for_gradients_is_refused() -> None:
    """The graph behind a batch was cut off in silence: an embedding outside the pipeline learned nothing."""
    pipe = penstock.Pipeline(Scaled(), stages=2, microbatches=2, loss_fn=F.mse_loss, example=(X,))
    embedded = nn.Linear(4, 4)(X)
    scale = torch.ones(8, 1, requires_grad=True)
    with pytest.raises(UsageError, match=r"argument 0 of step\(\) requires a gradient, but a step gives none"):
        pipe.step(embedded, target=Y)
    with pytest.raises(UsageError, match=r"the target of step\(\) requires a gradient"):
        pipe.step(X, target=embedded)
    with pytest.raises(UsageError, match=r"argument 0 of step\(\) requires"):
        pipe.step(penstock.Microbatches(embedded.chunk(2)), target=penstock.Microbatches(Y.chunk(2)))
    with pytest.raises(UsageError, match=r"argument 1 of step\(\) requires"):
        pipe.step(X, penstock.Shared(scale), target=Y)
    pipe.evaluate(embedded, target=Y)
    pipe.step(embedded.detach(), target=Y)


def test_a_model_without_a_loss() -> None:
    with pytest.raises(PeerFailure, match=r"there is no loss_fn, and the model returned a tensor of shape \(4, 4\)"):
        pipeline(loss_fn=None).step(X)
    with pytest.raises(PeerFailure, match=r"\(a target alone computes none\); pass loss_fn="):
        pipeline(loss_fn=None).step(X, target=Y)


def test_the_loss_of_a_step_has_been_gone_back_through() -> None:
    result = pipeline().step(X, target=Y)
    for loss in (result.loss, *result.losses):
        assert loss is not None
        with pytest.raises(UsageError, match=r"step\(\) has computed all gradients already"):
            loss.backward()
        assert type(loss * 2) is type(copy.deepcopy(loss)) is Tensor
        assert repr(loss) == repr(loss.detach().clone())
        buffer = io.BytesIO()
        torch.save(loss, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), loss)


def test_a_wrapped_model_is_refused_by_its_wrapper() -> None:
    with pytest.raises(UsageError, match="the model is wrapped in DataParallel"):
        pipeline(nn.DataParallel(Scaled()), example=(X,))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole_has_nowhere_to_cut() -> None:
    for model in (Scaled(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        with pytest.raises(UsageError, match=r"compiled as a whole by torch\.compile, so there is no place to cut it"):
            pipeline(torch.compile(model), example=(X,))
        with pytest.raises(UsageError, match=r"compiled as a whole by torch\.compile"):
            penstock.GPipe(torch.compile(model), balance=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_a_gpu_that_is_not_there() -> None:
    for make in (lambda: pipeline(devices=["cuda:0", "cuda:1"]), lambda: penstock.GPipe(Scaled(), devices=["cuda:0"])):
        with pytest.raises(UsageError, match="devices has cuda:0, but torch sees no GPU here"):
            make()


def test_parity_is_given_a_model_and_not_a_pipeline() -> None:
    for given in ((pipeline(), {"stages": 2}), (Scaled(), pipeline())):
        with pytest.raises(UsageError, match=r"parity\(\) makes its own Pipeline"):
            penstock.parity(given[0], X, target=Y, pipeline=given[1])  # type: ignore[arg-type]


def test_rows_that_are_not_the_batchs_name_the_way_to_split_them() -> None:
    with pytest.raises(
        ModelError, match=r"'scale' has 24 rows .* penstock.Microbatches\(\[one part for each microbatch\]\)"
    ):
        pipeline(Scaled(), example=(X,)).step(X, scale=torch.ones(24, 4), target=Y)


def test_an_example_may_have_the_marks_of_a_batch() -> None:
    scale = torch.rand(4)
    pipe = pipeline(Scaled(), example={"x": X, "scale": penstock.Shared(scale)})
    result = pipe.step(x=X, scale=penstock.Shared(scale), target=Y)
    plain = Scaled()
    plain.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(result.loss, F.mse_loss(plain(X, scale), Y).detach())


def test_lengths_that_only_the_split_reads_need_no_stage_that_takes_them() -> None:
    pipe = pipeline(batch_options=BatchOptions(split=penstock.by_tokens(lengths="lengths", sequences=())))
    result = pipe.step(X, lengths=torch.arange(1, 9), target=Y)
    torch.testing.assert_close(
        result.loss, F.mse_loss(nn.Sequential(*pipe.deployment.ranks.modules().values())(X), Y).detach()
    )


def test_errors_are_there_without_an_import_of_their_own() -> None:
    code = "import penstock, sys; assert penstock.errors.UsageError and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=500).returncode == 0


def slips() -> list[tuple[str, str]]:
    found = []
    with pipeline() as pipe:
        for args in ((X,), (X, Y)):
            with pytest.raises(PenstockError) as caught:
                pipe.step(*args)
            found.append((type(caught.value).__name__, str(caught.value)))
        pipe.step(X, target=Y)
    return found


def test_all_processes_hear_of_it() -> None:
    first, last = on_processes(2, slips)
    for rank in (first, last):
        assert "step() was passed no target" in rank[0][1]
        assert "the target goes by name" in rank[1][1]
    assert last[0][0] == last[1][0] == "UsageError"
