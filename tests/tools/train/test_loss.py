"""The loss of a step: its gradient is that of the mean over all target tokens, however the step is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import ModelError, UsageError
from penstock.tools.train.build import build_pipeline
from penstock.tools.train.config.read import load_config
from penstock.tools.train.data.batch import DataBatch
from penstock.tools.train.loss import GivenLoss, MeanLoss, StepLoss, TokenLoss, build_loss, shares_of

TOKENS, ROWS, LENGTH = 11, 8, 6
PASSES = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(TOKENS, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, TOKENS)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    """Of very different numbers of targets, in rows, in microbatches and in passes; one microbatch has none."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(PASSES):
        ids = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)
        target = torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)
        share = torch.rand(ROWS, 1, generator=generator) / (number + 1)
        target[torch.rand(ROWS, LENGTH, generator=generator) > share] = -100
        target[:, 0] = 3
        target[:2] = -100
        found.append((ids, target))
    return found


def plain(weight: str, smoothing: float = 0.0) -> tuple[float, list[Tensor]]:
    """One loss over everything at once."""
    ids, target = (torch.cat(each) for each in zip(*batches(), strict=True))
    net = model()
    losses = F.cross_entropy(
        net(ids).flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    ).view(target.shape)
    counted = target != -100
    loss = losses.sum() / counted.sum()
    if weight == "rows":
        rows = counted.any(1)
        loss = (losses.sum(1)[rows] / counted.sum(1)[rows]).mean()
    loss.backward()
    return loss.item(), [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """As users write it: a mean over the targets of the microbatch; 0 where there are none."""
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return losses / (target != -100).sum().clamp(min=1)


def accumulated(loss: StepLoss, mesh: Any = None) -> tuple[float, list[Tensor]]:
    """The same in passes through a pipeline, and with a mesh on some rows each."""
    options = {"ranks": 2} if mesh is None else {"mesh": mesh}
    with penstock.Pipeline(
        model(), stages=2, microbatches=4, schedule="1f1b", loss_fn=loss, loss_options=loss.options, **options
    ) as pipe:
        given = batches()
        total = 0.0
        for (ids, target), share in zip(given, shares_of(loss, [target for _, target in given]), strict=True):
            mine = DataBatch((ids,), {}, target, 0)
            if mesh is not None:
                mine = mine.share(mesh.get_local_rank("dp"), 2)
            result = pipe.step(*mine.args, target=mine.target, loss_kwargs=share)
            assert result.loss is not None
            total += result.loss.item()
        return total, [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("loss", "weight", "smoothing"),
    [
        (TokenLoss(), "tokens", 0.0),
        (TokenLoss("rows"), "rows", 0.0),
        (TokenLoss(label_smoothing=0.2), "tokens", 0.2),
        (GivenLoss(mean_loss, "tokens"), "tokens", 0.0),
    ],
    ids=["tokens", "rows", "smoothed", "given"],
)
def test_passes_of_ragged_batches_make_the_gradient_of_one_mean(loss: StepLoss, weight: str, smoothing: float) -> None:
    wanted, gradients = plain(weight, smoothing)
    value, found = accumulated(loss)
    assert value == pytest.approx(wanted, rel=1e-13)
    torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-15)


def replicated() -> Any:
    return accumulated(TokenLoss(), penstock.mesh(pp=1, dp=2)), accumulated(
        GivenLoss(mean_loss, "tokens"), penstock.mesh(pp=1, dp=2)
    )


@pytest.mark.slow
def test_replicas_on_processes_make_the_gradient_of_one_mean() -> None:
    wanted, gradients = plain("tokens")
    for answers in on_processes(2, replicated):
        for value, found in answers:
            assert value == pytest.approx(wanted, rel=1e-13)
            torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-15)


def test_a_step_without_targets_is_refused() -> None:
    nothing = torch.full((2, 3), -100)
    with pytest.raises(ModelError, match="no target of this step counts"):
        TokenLoss().shares([nothing, nothing])
    assert TokenLoss().shares([nothing, torch.zeros(2, 3)])[0] == {"total": 6.0, "passes": 2}
    with pytest.raises(ModelError, match="pass 0 of this step has no target that counts"):
        GivenLoss(mean_loss, "tokens").shares([nothing, torch.zeros(2, 3)])
    with pytest.raises(UsageError, match="the target is a dict"):
        GivenLoss(mean_loss, "rows").count({})


def test_the_loss_of_tokens_is_computed_once_per_microbatch_whatever_the_batch() -> None:
    """The check whether losses of microbatches add up came back with each new kind of batch: in the second pass of an
    accumulated step, its tensors were counted as activations, half as much again as a dry run had predicted."""

    class Counting(TokenLoss):
        calls = 0

        def __call__(self, *given: Any, **more: Any) -> Tensor:
            self.calls += 1
            return super().__call__(*given, **more)

    loss = Counting()
    example = (batches()[0][0],)
    with penstock.Pipeline(
        model(), stages=2, microbatches=4, loss_fn=loss, loss_options=loss.options, example=example
    ) as pipe:
        for number, (ids, target) in enumerate(batches(), 1):
            width = LENGTH - number
            (share,) = loss.shares([target[:, :width]])
            pipe.step(ids[:, :width], target=target[:, :width], loss_kwargs=share)
            assert loss.calls == 4 * number


def test_evaluations_are_averaged_by_what_they_count() -> None:
    mean = MeanLoss(TokenLoss())
    assert mean.value is None
    mean.add(1.0, torch.zeros(1, 3))
    mean.add(5.0, torch.tensor([[0, -100, -100]]))
    assert mean.value == 2.0
    alike = MeanLoss(mean_loss)
    alike.add(1.0, None)
    alike.add(3.0, None)
    assert alike.value == 2.0


def test_the_loss_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    assert isinstance(build_loss(load_config(None), net, None, True), TokenLoss)
    assert build_loss(load_config(None), net, mean_loss, True) is mean_loss
    assert build_loss(load_config(None), net, None, False) is None
    assert isinstance(build_loss(load_config(None, ["training.accumulate=2"]), net, None, False), GivenLoss)
    with pytest.raises(UsageError, match=r"loss.label_smoothing is for the built-in loss, and model.source brings"):
        build_loss(load_config(None, ["loss.label_smoothing=0.1"]), net, mean_loss, True)
    with pytest.raises(UsageError, match=r"loss.router is 0.1, but gpt has no router loss"):
        build_loss(load_config(None, ["loss.router=0.1"]), net, None, True)
    (tmp_path / "my_losses.py").write_text(
        "def scaled(output, target, by):\n    return by * (output - target).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = build_loss(load_config(None, ["loss.function=my_losses:scaled", "loss.options={by=3}"]), net, mean_loss, True)
    assert isinstance(own, GivenLoss)
    assert own(torch.ones(2), torch.zeros(2)) == 3


@pytest.mark.slow
def test_a_router_loss_is_the_mean_over_microbatches_and_passes() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **shape)
    config.use_cache = False
    mixture = AutoModelForCausalLM.from_config(config).eval()
    ids, target = torch.randint(0, 32, (2, 4, 6)), torch.randint(0, 32, (2, 4, 6))
    settings = load_config(
        None, ["loss.router=0.5", "training.accumulate=2", "pipeline.microbatches=2", "pipeline.ranks=2"]
    )
    batch = DataBatch((ids[0],), {}, target[0], 24)
    with build_pipeline(settings, mixture, None, batch, ranks=2, transport="threads") as pipe:
        shares = shares_of(pipe.loss_fn, list(target))
        results = [pipe.step(ids[number], target=target[number], loss_kwargs=shares[number]) for number in range(2)]
        found = {name: value.grad.clone() for name, value in pipe.named_parameters() if value.grad is not None}
    mixture.zero_grad()
    assert mixture.config.output_router_logits
    total = torch.zeros(())
    for tokens, wanted in zip(ids.view(4, 2, 6), target.view(4, 2, 6), strict=True):
        output = mixture(tokens)
        total = total + F.cross_entropy(output.logits.flatten(0, 1), wanted.flatten()) / 4 + 0.5 * output.aux_loss / 4
    total.backward()
    made = sum(result.loss + result.extra_losses["router"] for result in results)
    torch.testing.assert_close(made, total.detach())
    for name, parameter in mixture.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
