"""What a loss is a mean over is read off its graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.runtime.loss.losses import fetch
from penstock.runtime.loss.reading import Forms, Reading, names_below, read_loss

ROWS, WIDTH = 4, 6
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])
LABELS = torch.tensor([1, -100, 2, 5])
Loss = Callable[[Tensor], Tensor]


def read(loss: Tensor, output: Tensor | None = None, forms: Forms | None = None) -> Reading:
    found = read_loss(loss, output, {} if forms is None else forms)
    assert found is not None
    return found[0]


def factors(loss: Loss, forms: Forms | None = None) -> list[float] | None:
    """What each entry of each term counts; None where something could not be read."""
    output = torch.rand(ROWS, WIDTH, requires_grad=True) * 1
    reading = read(loss(output), output, forms)
    return values(reading) if reading.form.is_complete else None


def values(reading: Reading) -> list[float]:
    seen = fetch([by for by in reading.numbers if isinstance(by, Tensor)])
    numbers = [seen[id(by)] if isinstance(by, Tensor) else by for by in reading.numbers]
    return [term.value(numbers) for term in reading.form.terms]


READ: dict[str, tuple[Loss, list[float]]] = {
    "a mean": (lambda o: o.mean(), [1 / 24]),
    "of some": (lambda o: o[MASK > 0].mean(), [1 / 18]),
    "a sum": (lambda o: 3 * o.sum(), [3.0]),
    "masked": (lambda o: (o.mean(1) * MASK).sum() / MASK.sum(), [1 / 3]),
    "by a reciprocal": (lambda o: (o.mean(1) * MASK).sum() * (1 / MASK.sum()), [1 / 3]),
    "at least one": (lambda o: -(o.mean(1) * MASK).sum() / MASK.sum().clamp(min=1).double(), [1 / 3]),
    "scaled inside": (lambda o: (2 * (o.mean(1) * MASK) / MASK.sum()).view(2, 2).sum(), [2 / 3]),
    "weights with a mean of 1": (lambda o: (MASK * o.mean(1) / MASK.mean()).mean(), [1 / 3]),
    "a product": (lambda o: o.mean(1) @ MASK / MASK.sum(), [1 / 3]),
    "in Einstein's notation": (lambda o: -torch.einsum("b,b->", o.mean(1), MASK) / MASK.sum(), [1 / 3]),
    "another mean": (lambda o: F.smooth_l1_loss(o, o.detach()), [1 / 24]),
    "another sum": (lambda o: F.mse_loss(o, o.detach(), reduction="sum"), [1.0]),
    "likelihood": (lambda o: F.cross_entropy(o, LABELS), [1 / 3]),
    "smoothed": (lambda o: F.cross_entropy(o, LABELS, label_smoothing=0.1), [0.1 / 6 / 3, 0.9 / 3]),
    "several": (lambda o: o.mean() - 2 * (o.sum() + 1), [2.0, 1 / 24]),
}


@pytest.mark.parametrize("name", READ)
def test_what_each_entry_counts_is_read(name: str) -> None:
    loss, wanted = READ[name]
    assert factors(loss) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("loss", [lambda o: o.max(), lambda o: o.mean().sqrt(), lambda o: o.mean() / o.sum()])
def test_what_is_no_sum_of_means_is_not_taken_for_one(loss: Loss) -> None:
    assert factors(loss) is None


@pytest.mark.parametrize("loss", [lambda o: (o.mean(1) * (MASK / 3)).sum(), lambda o: o.mean(1) @ (MASK / 3)])
def test_a_divisor_inside_of_weights_is_not_read(loss: Loss) -> None:
    assert factors(loss) is None


def test_terms_of_single_rows_are_one_with_what_they_have_in_common() -> None:
    output = torch.rand(ROWS, WIDTH, requires_grad=True) * 1
    rows = torch.stack([row.sum() / divisor for row, divisor in zip(output, (1, 2, 3, 4), strict=True)])
    form, numbers = read(rows.sum() / 5, output)
    assert len(form.terms) == 4
    assert [term.value(numbers) for term in form.terms_of(ROWS)] == [1 / 5]  # type: ignore[arg-type]
    assert form.terms_of(3) == form.terms, "these are no rows"
    row = output[0].sum() / 2
    for loss, wanted in ((torch.stack([row]).sum() / 5, 1 / 5), (sum([row]) / 5, 1 / 5), (row / 5, math.nan)):
        form, numbers = read(loss, output)
        found = [term.value(numbers) for term in form.terms_of(1)]  # type: ignore[arg-type]
        assert found == pytest.approx([wanted], nan_ok=True), "nan: nobody knows which of the divisors is the row's own"


def test_numbers_are_those_of_each_loss_although_its_graph_is_analysed_once() -> None:
    forms: Forms = {}
    for mask in (MASK, 1 - MASK, torch.ones(ROWS)):
        assert factors(lambda o, mask=mask: (o.mean(1) * mask).sum() / mask.sum(), forms) == [1 / mask.sum().item()]
    for kind, value in (("mean", 1 / 3), ("sum", 1.0)):
        assert factors(lambda o, kind=kind: F.cross_entropy(o, LABELS, reduction=kind), forms) == pytest.approx([value])
    assert len(forms) == 3  # a mean is another loss than a sum, although its nodes are the same


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scale_that_becomes_a_weight_for_each_entry_is_read_anew(reverse: bool) -> None:
    """The nodes are the same; only the number has got a dimension, or lost it."""
    forms: Forms = {}
    wanted = [(torch.tensor(3.0), [3.0]), (MASK, None)]
    for by, value in reversed(wanted) if reverse else wanted:
        assert factors(lambda o, by=by: (o.mean(1) * by).sum(), forms) == value


def test_what_the_model_multiplies_by_is_not_of_the_loss() -> None:
    output = torch.rand(ROWS, WIDTH, requires_grad=True) * MASK.sum()
    assert values(read(output.mean(), output)) == [1 / 24]


def test_a_term_of_parameters_alone_is_not_of_rows() -> None:
    weight, output = torch.rand(3, requires_grad=True), torch.rand(ROWS, WIDTH, requires_grad=True)
    reading = read(output.square().mean() + weight.square().mean(), output)
    found = zip(reading.form.terms, values(reading), strict=True)
    assert sorted((term.of_rows, value) for term, value in found) == [(False, 1 / 3), (True, 1 / 24)]
    assert read_loss(torch.rand(()), None, {}) is None


def test_forms_and_names_end_at_the_output() -> None:
    forms: Forms = {}
    hidden = torch.rand(ROWS, WIDTH, requires_grad=True)
    for output in (hidden.exp(), hidden * 2, hidden):
        loss = (output * 2).tanh().mean()
        read(loss, output, forms)
        assert names_below(loss, output) == ("MeanBackward0", "TanhBackward0", "MulBackward0", "", "NoneType")
    assert len(forms) == 1
