"""A loss is asked whether its microbatches make the batch: one that does not is refused, with numbers and remedies."""

from __future__ import annotations

import pytest
import torch
from runtime.loss.asked import WIDTH, M, batch, close, masked, model, pipeline, refused, stepped, whole
from torch import Tensor
from torch.nn import functional as F

import penstock
from penstock import LossOptions


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    one, two = F.normalize(output.flatten(1), dim=-1), F.normalize(target.flatten(1), dim=-1)
    return F.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))


def test_a_mean_over_something_else_is_refused_and_right_with_its_weight() -> None:
    x, y, mask = batch()
    said = refused(pipeline(masked), x, target=y, loss_kwargs={"mask": mask})
    numbers = [masked(model()(x[rows]), y[rows], mask[rows]).item() for rows in (slice(3), slice(3, 6), slice(6))]
    assert f"their own, {numbers[0]:.7g} (weighing 3) and {numbers[1]:.7g} (weighing 3), make" in said
    assert f"taken together is {numbers[2]:.7g}" in said
    assert "weight=" in said
    pipe = pipeline(masked, loss_options=LossOptions(weight=lambda mask: mask.sum()))
    for seed in range(2):
        x, y, mask = batch(seed=seed)
        close(stepped(pipe, x, target=y, loss_kwargs={"mask": mask}), whole(masked, x, y, mask=mask))
        close(pipe.evaluate(x, target=y, loss_kwargs={"mask": mask}).loss, whole(masked, x, y, mask=mask)[0])


def test_a_sum_is_refused_and_right_as_one() -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    x, y, _ = batch()
    assert "they add up, so pass loss_options=LossOptions(reduction='sum')" in refused(pipeline(total), x, target=y)
    pipe = pipeline(total, loss_options=LossOptions(reduction="sum"))
    for _ in range(2):
        close(stepped(pipe, x, target=y), whole(total, x, y))


def test_rows_that_are_compared_are_refused_unless_that_is_meant() -> None:
    """Each microbatch then compares its own rows, and counts by their number."""
    x, y, _ = batch()
    assert "per_microbatch=True if that is what you mean" in refused(pipeline(contrastive), x, target=y)
    pipe = pipeline(contrastive, loss_options=LossOptions(per_microbatch=True))
    net = model()
    shares = [
        (contrastive(net(a), b), len(a) / len(x)) for a, b in zip(x.tensor_split(M), y.tensor_split(M), strict=True)
    ]
    value = sum((loss * share for loss, share in shares), torch.zeros(()))
    value.backward()
    for _ in range(2):
        close(stepped(pipe, x, target=y), (value.detach(), [p.grad for p in net.parameters()]))


def test_a_wrong_weight_is_refused() -> None:
    x, y, mask = batch()
    pipe = pipeline(masked, loss_options=LossOptions(weight=lambda target, mask: (~mask).sum()))
    assert "taken together" in refused(pipe, x, target=y, loss_kwargs={"mask": mask})


def test_a_sum_of_means_is_refused() -> None:
    x, y, _ = batch()
    assert "make" in refused(
        pipeline(lambda o, t: (o - t).square().mean(), loss_options=LossOptions(reduction="sum")), x, target=y
    )


def test_a_microbatch_whose_own_loss_is_nan_is_refused_if_the_batch_has_one() -> None:
    """All its targets are ignored: its mean is nan, and its gradients zero, so that all others are scaled wrongly."""

    def shifted(output: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(output.flatten(0, 1), target.flatten())

    x, _, mask = batch()
    labels = torch.ones(mask.shape, dtype=torch.long)
    labels[:3] = -100
    assert "their own, nan (weighing 3)" in refused(pipeline(shifted), x, target=labels)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_difference_below_the_rounding_of_coarse_numbers_is_seen(autocast: bool) -> None:
    """In bfloat16, 3 % are rounding; a mask that is uneven may change the loss by less, and gradients by half."""
    x, y, mask = batch()
    mask[:] = True
    mask[0, 0] = False
    kind = torch.float32 if autocast else torch.bfloat16
    pipe = penstock.Pipeline(
        model().to(kind), stages=2, microbatches=M, loss_fn=masked, precision="bf16" if autocast else None
    )
    assert "taken together" in refused(pipe, x.to(kind), target=y.to(kind), loss_kwargs={"mask": mask})


def test_a_loss_that_computes_in_coarse_numbers_may_round_as_they_do() -> None:
    def coarse(output: Tensor, target: Tensor) -> Tensor:
        return (output.bfloat16() - target.bfloat16()).square().mean().float()

    torch.manual_seed(0)
    for _ in range(5):
        pipe = penstock.Pipeline(model().bfloat16(), stages=2, microbatches=M, loss_fn=coarse)
        pipe.step(torch.randn(8, 50, WIDTH).bfloat16(), target=torch.randn(8, 50, WIDTH).bfloat16())


def test_a_target_that_the_loss_computes_must_be_weighed_by_the_user() -> None:
    """A cross-entropy of targets that are in no argument shows what it is a mean over, but not in advance."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        labels = target.sum(-1).gt(0).long() + target.sum(-1).gt(3).long()
        return F.cross_entropy(output.flatten(0, 1), labels.masked_fill(target[..., 0] > 0.5, -100).flatten())

    x, y, _ = batch()
    y[:3, :, 0] = 1.0
    y[3:, :, 0] = 0.0
    y[2, 0, 0] = 0.0
    said = refused(pipeline(loss), x, target=y)
    assert "weight=" in said
    pipe = pipeline(loss, loss_options=LossOptions(weight=lambda target: (target[..., 0] <= 0.5).sum()))
    close(stepped(pipe, x, target=y), whole(loss, x, y))


def test_weights_that_are_rounded_as_the_numbers_are_make_no_difference() -> None:
    """Sums in bfloat16 are off by some thousandths; asked in float32, the weights are as exact as the losses."""

    def weighted(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - target[0]).square().mean(1) * target[1]).sum() / target[1].sum()

    torch.manual_seed(0)
    pipe = penstock.Pipeline(
        model().bfloat16(),
        stages=2,
        microbatches=M,
        loss_fn=weighted,
        loss_options=LossOptions(weight=lambda target: target[1].sum()),
    )
    with pipe:
        for _ in range(8):
            x, y = torch.randn(2, 11, WIDTH).bfloat16()
            pipe.step(x, target=(y, (0.1 + torch.rand(11)).bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    """Signed terms that nearly cancel: their mean is far below them, and rounding large beside it."""

    def signed(output: Tensor, target: Tensor) -> Tensor:
        return ((output - output.detach() + 1) * target).mean()

    torch.manual_seed(0)
    for _ in range(10):
        y = torch.randn(8, 50, WIDTH)
        y = (y - y.mean((1, 2), keepdim=True)).to(dtype)
        pipe = penstock.Pipeline(model().to(dtype), stages=2, microbatches=M, loss_fn=signed)
        pipe.step(torch.randn(8, 50, WIDTH).to(dtype), target=y)
