"""A loss is asked whether its microbatches make the batch: one that does not is refused, with numbers and remedies.

In the first step by all its neighbours; in later ones by what its graph shows, and by one pair in turn.
"""

from __future__ import annotations

import functools
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runtime.loss.asked import WIDTH, M, batch, close, masked, model, pipeline, refused, stepped, whole
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import BatchOptions, LossOptions
from penstock.errors import PeerFailure
from penstock.runtime.loss import check


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
        each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        return each.sum() / (target != -100).sum()

    x, _, mask = batch()
    labels = torch.ones(mask.shape, dtype=torch.long)
    labels[:3] = -100
    assert "their own, nan (weighing 3)" in refused(pipeline(shifted), x, target=labels)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_difference_below_the_rounding_of_coarse_numbers_is_read(autocast: bool) -> None:
    """In bfloat16, 3 % are rounding; a mask that is uneven may change the loss by less, and gradients by half."""
    x, y, mask = batch()
    mask[:] = True
    mask[0, 0] = False
    kind = torch.float32 if autocast else torch.bfloat16
    pipe = penstock.Pipeline(
        model().to(kind), stages=2, microbatches=M, loss_fn=masked, precision="bf16" if autocast else None
    )
    assert "are means over 11 and 12 entries" in refused(
        pipe, x.to(kind), target=y.to(kind), loss_kwargs={"mask": mask}
    )


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


def test_an_evaluation_asks_too() -> None:
    x, y, mask = batch()
    with pytest.raises(PeerFailure, match="taken together"):
        pipeline(masked).evaluate(x, target=y, loss_kwargs={"mask": mask})


class Stateful(nn.Module):
    """A loss that counts, and remembers what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("total", torch.zeros(()).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.total += output.detach().sum()
        self.seen.append(len(output))
        return (output - target).square().mean()


def test_the_state_of_a_loss_is_that_of_its_own_calls() -> None:
    x, y, _ = batch()
    found = []
    for asked in (False, True):
        loss = Stateful()
        pipe = pipeline(loss, loss_options=LossOptions(per_microbatch=not asked))
        result = stepped(pipe, x, target=y)
        found.append((result, loss.calls, loss.seen, loss.total))
    assert found[0][1:3] == found[1][1:3] == (M, [3, 3, 2])
    assert torch.equal(found[0][3], found[1][3])
    close(found[0][0], found[1][0])


class Keeping(nn.Module):
    """Keeps its terms, as one does to log them; one compares rows with each other."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.terms = {"error": (output - target).square().mean(), "drift": (output - target).mean(0).square().sum()}
        return self.terms["error"] + self.terms["drift"]


def test_a_loss_that_keeps_its_terms_is_asked_all_the_same() -> None:
    """They have a graph, so that it could not be copied, and was not asked."""
    x, y, _ = batch(9)
    with pipeline(Keeping()) as pipe:
        assert "taken together" in refused(pipe, x, target=y)


class Logging(nn.MSELoss):
    """Holds what nobody can copy."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_loss_that_cannot_be_copied_warns_that_it_is_not_asked() -> None:
    x, y, _ = batch(9)
    with pipeline(Logging()) as pipe, pytest.warns(UserWarning, match=r"could not be checked: it cannot be copied \("):
        pipe.step(x, target=y)


@pytest.mark.parametrize("source", ["torch", "python"])
def test_a_loss_that_draws_cannot_be_asked_and_draws_the_same_numbers(source: str) -> None:
    def noisy(output: Tensor, target: Tensor) -> Tensor:
        noise = torch.rand(()).item() if source == "torch" else random.random()
        return (output - target).square().mean() * noise

    x, y, _ = batch()
    found = []
    for asked in (False, True):
        random.seed(5)
        pipe = pipeline(noisy, loss_options=LossOptions(per_microbatch=not asked), seed=4, ranks=2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.append((stepped(pipe, x, target=y), stepped(pipe, x, target=y), random.random()))
        assert ["could not be checked: it draws random numbers" in str(each.message) for each in said] == [True] * asked
    close(found[0], found[1])


def test_rows_may_be_in_another_dimension() -> None:
    def total(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum((0, 2)).mean()

    x, y, _ = batch()
    x, y = x.transpose(0, 1), y.transpose(0, 1)
    pipe = pipeline(total, batch_options=BatchOptions(dims={0: 1, "target": 1, "output": 1}))
    close(stepped(pipe, x, target=y), whole(total, x, y))


# -- losses that go wrong later


APART = 12


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs have their turn sooner than in training."""
    monkeypatch.setattr(check, "APART", APART)


def test_a_loss_that_was_a_mean_over_rows_until_masks_became_uneven_is_refused_then() -> None:
    pipe = pipeline(masked)
    x, y, mask = batch()
    pipe.step(x, target=y, loss_kwargs={"mask": torch.ones_like(mask)})
    pipe.step(x, target=y, loss_kwargs={"mask": torch.ones_like(mask)})
    assert "are means over" in refused(pipe, x, target=y, loss_kwargs={"mask": mask})


def nan_masked(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.nan_to_num()).square()[~target.isnan()].mean()


def weighted(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return ((output - target).square().mean(-1) * weight).sum() / weight.sum()


@pytest.mark.parametrize("what", ["fractions as a mask", "weights", "nan", "-100 among zeros", "lengths"])
def test_it_is_refused_in_the_step_in_which_what_counts_becomes_uneven(what: str) -> None:
    """What a loss is divided by is read in every step."""
    x, y, mask = batch()
    later = torch.rand(mask.shape).double() + 0.5
    if what == "nan":
        uneven = y.clone()
        uneven[0, :, :3] = torch.nan
        steps: list[dict[str, Any]] = [{"target": y}, {"target": uneven}]
        pipe = pipeline(nan_masked)
    elif what == "-100 among zeros":
        labels = torch.zeros(mask.shape, dtype=torch.long)
        labels[:4] = 1  # 0 is uneven from the first step on
        ignored = labels.clone()
        ignored[0] = -100

        def valid(output: Tensor, target: Tensor) -> Tensor:
            each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
            return each.sum() / (target != -100).sum()

        steps, pipe = [{"target": labels}, {"target": ignored}], pipeline(valid)
    else:
        now = {"fractions as a mask": mask.double(), "weights": later, "lengths": (later * 9).long()}[what]
        told = ({"weight": torch.ones_like(now)}, {"weight": now})
        steps, pipe = [{"target": y, "loss_kwargs": each} for each in told], pipeline(weighted)
    pipe.step(x, **steps[0])
    pipe.step(x, **steps[0])
    assert "are means over" in refused(pipe, x, **steps[1])


def own_padding(pad: int) -> Callable[..., Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
        valid = (target != pad).flatten()
        return (each * valid).sum() / valid.sum()

    return loss


@pytest.mark.parametrize("pad", [0, 1, 5, 255])
def test_an_own_masked_mean_is_refused_in_the_step_in_which_it_goes_wrong(pad: int) -> None:
    """Only some numbers were taken for padding, and the first batches had none."""
    x, _, _ = batch()
    net = nn.Sequential(*model(), nn.Linear(WIDTH, 256).double())
    with penstock.Pipeline(net, stages=2, microbatches=M, loss_fn=own_padding(pad)) as pipe:
        labels = torch.full((8, 4), 3)
        for _ in range(3):
            pipe.step(x, target=labels)
        labels[7, 2:] = pad
        assert "are means over" in refused(pipe, x, target=labels)


def test_a_mean_over_selected_entries_is_refused_in_the_step_in_which_it_goes_wrong() -> None:
    def hard(output: Tensor, target: Tensor) -> Tensor:
        each = (output - target).square()
        return each[target > 0.9].mean()

    x, y, _ = batch(9)
    y[:] = 1.0
    with pipeline(hard) as pipe:
        for _ in range(10):
            pipe.step(x, target=y)
        y[0, 0, :2] = 0.0
        assert "are means over 70 and 72 entries, but count as 3 and 3, by rows" in refused(pipe, x, target=y)


class Later(nn.Module):
    """A masked term that an attribute switches on."""

    switched = False
    inside = False

    def forward(self, output: Tensor, target: Tensor, mask: Tensor, factor: float = 0.0) -> Tensor:
        each = (output - target).square().mean(-1)
        if self.inside:
            each = each * (mask / mask.double().mean())
        loss = each.mean() + factor * (each * mask).sum() / mask.sum()
        return loss + 0.1 * (each * mask).sum() / mask.sum() if self.switched else loss


@pytest.mark.parametrize("how", ["attribute", "attribute inside", "loss_kwargs", "new loss_kwargs", "from the start"])
def test_a_term_that_is_switched_on_later_is_refused_then(how: str) -> None:
    x, y, mask = batch(9)
    loss, more = Later(), {} if how != "loss_kwargs" else {"factor": 0.0}
    loss.switched = how == "from the start"
    with pipeline(loss) as pipe:
        first = torch.ones_like(mask) if how == "from the start" else mask
        for _ in range(APART // M + 2):
            pipe.step(x, target=y, loss_kwargs={"mask": first, **more})
        if how.startswith("attribute"):
            loss.switched, loss.inside = how == "attribute", how == "attribute inside"
        else:
            more = {} if how == "from the start" else {"factor": 0.3}
        refused(pipe, x, target=y, loss_kwargs={"mask": mask, **more})


def attempts(function: Callable[[], Any], times: int) -> str:
    """The first error."""
    for _ in range(times):
        try:
            function()
        except PeerFailure as failure:
            return str(failure)
    return ""


def test_what_no_graph_shows_is_found_by_turns() -> None:
    """Weights that are normalised beforehand: the sum has no divisor."""

    def normalised(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        weight = mask / mask.sum()
        return ((output - target).square().mean(-1) * weight).sum()

    x, y, mask = batch(9)
    mask[:] = True
    with pipeline(normalised) as pipe:
        pipe.step(x, target=y, loss_kwargs={"mask": mask})
        mask[8, 1:] = False
        assert M <= check.UNREAD * M <= APART, "one of the pairs has its turn in each step"
        found = attempts(lambda: pipe.step(x, target=y, loss_kwargs={"mask": mask}), M - 1)
    assert "microbatches 1 and 2 taken together" in found


def test_a_refused_step_is_refused_again() -> None:
    x, y, _ = batch(9)
    with pipeline(contrastive) as pipe:
        assert refused(pipe, x, target=y) == refused(pipe, x, target=y)


def test_each_pair_has_its_turn() -> None:
    calls: list[int] = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        return (output - target).square().mean()

    x, y, _ = batch(9)
    counts = []
    with pipeline(counted) as pipe:
        for _ in range(2 * (APART // M) + 1):
            calls.clear()
            pipe.step(x, target=y)
            counts.append(len(calls) - M)
    quiet = [0] * (APART // M - 1)
    assert counts == [2 * (M - 1), *quiet, 2, *quiet, 2], "two calls for each pair"


def test_known_losses_are_called_for_their_microbatches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of them, and no batch is read."""
    x, y, _ = batch(9)
    seen = []
    original = F.mse_loss
    monkeypatch.setattr(F, "mse_loss", lambda *given, **more: (seen.append(len(given[0])), original(*given, **more))[1])
    with pipeline(nn.MSELoss()) as pipe:
        pipe.step(x, target=y)
    assert seen == [3, 3, 3]


def test_a_known_loss_that_spreads_its_target_over_all_rows_is_refused() -> None:
    x, y, _ = batch(9)
    with pipeline(F.l1_loss) as pipe, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the shapes
        pipe.step(x, target=y)
        refused(pipe, x, target=y[:, 0, 0].reshape(9, 1, 1, 1))


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target)[target > 0].square().mean()


def test_what_only_looks_like_a_known_loss_is_checked() -> None:
    """A wrapper has the name and the module of what it wraps; a module may be given another forward."""
    x, y, _ = batch(9)
    patched, labelled = nn.MSELoss(), nn.CrossEntropyLoss()
    patched.forward = masked_mean  # type: ignore[method-assign]
    labelled.forward = masked_mean  # type: ignore[method-assign, assignment]
    for loss in (functools.wraps(F.mse_loss)(masked_mean), patched, labelled):
        with pipeline(loss) as pipe:
            refused(pipe, x, target=y)


# -- another loss


def test_all_follows_from_the_loss_that_is_set() -> None:
    """Weighing and checks were those of the first loss."""
    x, y, _ = batch()
    labels = torch.randint(WIDTH, (8, 4))
    labels[0] = -100

    def total(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), target, reduction="sum")

    def smooth(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), target, label_smoothing=0.1)

    def rows(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    with pipeline(contrastive) as pipe:
        for _ in range(2):
            for loss, target in ((rows, y), (total, labels), (nn.MSELoss(), y), (smooth, labels)):
                pipe.loss_fn = loss
                close(stepped(pipe, x, target=target), whole(loss, x, target))
            pipe.loss_fn = contrastive
            assert "taken together" in refused(pipe, x, target=y)
