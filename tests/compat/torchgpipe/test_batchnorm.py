"""`penstock.compat.torchgpipe.batchnorm.DeferredBatchNorm`, in a pipeline and in a loop."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from compat.torchgpipe.models import CHUNKS, in_chunks
from torch import Tensor, nn

import penstock
from penstock.compat.torchgpipe import GPipe
from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm


def tilted() -> Tensor:
    """Channels and rows that differ by far: a mean of variances, or a difference of large numbers, would show."""
    x = torch.rand(16, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x * torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1) + 2.0 ** torch.arange(16).view(16, 1, 1, 1)


def pair(momentum: float | None = 0.1, chunks: int = CHUNKS) -> tuple[nn.BatchNorm2d, DeferredBatchNorm]:
    norm = nn.BatchNorm2d(3, momentum=momentum).double()
    return norm, DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(norm), chunks)  # type: ignore[return-value]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_loop_over_chunks_tracks_whole_batches(momentum: float | None) -> None:
    norm, deferred = pair(momentum)
    for _ in range(2):
        norm(tilted())
        in_chunks(deferred)(tilted())
    torch.testing.assert_close(deferred.running_mean, norm.running_mean)
    torch.testing.assert_close(deferred.running_var, norm.running_var)
    assert deferred.num_batches_tracked == 2
    assert not deferred.sum.any()
    torch.testing.assert_close(deferred.eval()(tilted()), norm.eval()(tilted()))


def test_outputs_and_gradients_are_those_of_microbatches() -> None:
    norm, deferred = pair()
    outputs, inputs = [], [tilted().requires_grad_() for _ in range(2)]
    for layer, x in zip((norm, deferred), inputs, strict=True):
        outputs.append(in_chunks(layer)(x))
        outputs[-1].square().mean().backward()
    assert torch.equal(*outputs)
    assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.equal(norm.weight.grad, deferred.weight.grad)  # type: ignore[arg-type]


def test_what_is_converted_and_what_is_kept() -> None:
    plain = nn.BatchNorm2d(3, track_running_stats=False)
    assert DeferredBatchNorm.convert_deferred_batch_norm(plain, 4) is plain
    deferred = DeferredBatchNorm(3, chunks=4)
    assert DeferredBatchNorm.convert_deferred_batch_norm(deferred, 4) is deferred
    assert DeferredBatchNorm.convert_deferred_batch_norm(deferred, 5) is not deferred
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3, affine=False))).eval()
    mean = model[1][0].running_mean
    converted = DeferredBatchNorm.convert_deferred_batch_norm(model, 4)
    assert type(converted[1][0]) is DeferredBatchNorm
    assert converted[1][0].running_mean is mean
    assert converted[1][0].weight is None
    assert not converted[1][0].training
    assert DeferredBatchNorm.convert_deferred_batch_norm(nn.BatchNorm1d(3))(torch.rand(4, 3)).shape == (4, 3)
    with pytest.raises(TypeError, match="2 dimensions"):
        deferred(torch.rand(3))


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_in_a_pipeline_fewer_chunks_commit_too(checkpoint: str) -> None:
    """9 rows in 4 chunks make 3; torchgpipe's layer waits for a fourth, for ever."""
    x = tilted()[:9]
    norm, deferred = pair()
    model = GPipe(nn.Sequential(deferred, nn.Conv2d(3, 3, 1).double()), [1, 1], chunks=4, checkpoint=checkpoint)
    model(x).sum().backward()
    norm(x)
    torch.testing.assert_close(deferred.running_var, norm.running_var)
    assert deferred.num_batches_tracked == 1


def test_copies_and_other_schedules() -> None:
    norm, deferred = pair()
    deferred = pickle.loads(pickle.dumps(copy.deepcopy(deferred)))
    model = nn.Sequential(deferred, nn.Conv2d(3, 3, 1).double())
    pipe = penstock.Pipeline(model, stages=2, microbatches=4, schedule="1f1b", loss_fn=nn.functional.mse_loss)
    pipe.step(tilted(), target=tilted())
    pipe.close()
    norm(tilted())
    torch.testing.assert_close(deferred.running_var, norm.running_var)
