"""Variable length: lengths, masks and packed sequences travel with the batch, and microbatches may go by tokens.

One group of two processes runs all scenarios; each returns what its rank saw, and the tests look at that.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import penstock
from penstock.errors import ModelError, PeerFailure, PenstockError, UsageError
from penstock.runtime.batch.lengths import LengthPlan
from penstock.schedule import build

VOCABULARY, WIDTH, CLASSES, LONGEST = 20, 8, 3, 12


LENGTHS = [12, 1, 3, 2, 2, 7, 1, 4, 3, 2]


Ranks = list[dict[str, Any]]


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out


class Attend(nn.Module):
    """Every token looks at the valid tokens of its row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        return x + F.scaled_dot_product_attention(query, key, value, valid[:, None, :].expand(-1, x.shape[1], -1))


class Classify(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        valid = (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)
        out: Tensor = self.head((x * valid).sum(1) / lengths[:, None])
        return out


class Tag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Whole(nn.Module):
    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        for stage in self.stages:
            ids = stage(ids, lengths)
        return ids


def stages(last: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [module.double() for module in (Embed(), Attend(), Attend(), last())]


def tag_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100)


def count_valid(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def batch(step: int = 0, filling: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, lengths, a class for each row, a tag for each token; `filling` is what padding consists of."""
    made = torch.Generator().manual_seed(step)
    lengths = torch.tensor(LENGTHS)[torch.randperm(len(LENGTHS), generator=made)]
    ids = torch.randint(1, VOCABULARY, (len(LENGTHS), LONGEST), generator=made)
    padding = torch.arange(LONGEST) >= lengths[:, None]
    labels = torch.randint(0, CLASSES, ids.shape, generator=made).masked_fill(padding, -100)
    labels[lengths > 3, 0] = -100  # not every valid token has a label
    return ids.masked_fill(padding, filling), lengths, torch.randint(0, CLASSES, (len(ids),), generator=made), labels


def classifier(**options: Any) -> penstock.Pipeline:
    given = {
        "microbatches": 4,
        "loss_fn": F.cross_entropy,
        "batch_options": penstock.BatchOptions(split=penstock.by_tokens()),
        "timeout": 20,
        **options,
    }
    return penstock.Pipeline(stages(Classify), ranks=2, schedule="interleaved-1f1b", **given)


def tagger(inputs: str = "every", split: Any = None, **options: Any) -> penstock.Pipeline:
    split = split or penstock.by_tokens(16, sequences={0: 1, "target": 1, "output": 1})
    given = {
        "loss_fn": tag_loss,
        "loss_options": penstock.LossOptions(weight=count_valid),
        "batch_options": penstock.BatchOptions(split=split, inputs=inputs),
        "timeout": 20,
        **options,
    }
    return penstock.Pipeline(stages(Tag), ranks=2, schedule="interleaved-1f1b", **given)


def trained(pipe: penstock.Pipeline, which: int, passes: bool = True) -> dict[str, Any]:
    """Two steps with an optimizer, and what the model then says."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    losses, counts, gradients = [], [], {}
    for step in range(2):
        ids, lengths, *targets = batch(step)
        given: Any = ((ids,), {"lengths": lengths, "target": targets[which]}) if passes else ((), {})
        losses.append(pipe.step(*given[0], **given[1]).loss)
        counts.append(pipe.microbatches)
        gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    ids, lengths, *_ = batch(9)
    output = pipe.predict(ids, lengths=lengths) if passes else pipe.predict()
    return {"losses": losses, "counts": counts, "gradients": gradients, "output": output}


def plainly(last: type[nn.Module], loss_fn: Any, which: int) -> dict[str, Any]:
    """The same on the whole batch at once, without microbatches."""
    model = Whole(stages(last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, gradients = [], {}
    for step in range(2):
        ids, lengths, *targets = batch(step)
        loss = loss_fn(model(ids, lengths), targets[which])
        loss.backward()
        losses.append(loss.detach())
        gradients = {name.removeprefix("stages."): p.grad.clone() for name, p in model.named_parameters()}  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    ids, lengths, *_ = batch(9)
    return {"losses": losses, "gradients": gradients, "output": model(ids, lengths).detach(), "lengths": lengths}


class Recurrent(nn.Module):
    """Takes and gives what is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        out: PackedSequence = self.rnn(packed)[0]
        return out


class Last(nn.Module):
    def forward(self, packed: PackedSequence) -> Tensor:
        padded, lengths = pad_packed_sequence(packed, batch_first=True)
        return padded[torch.arange(len(lengths)), lengths - 1]


def packed_batch() -> tuple[PackedSequence, Tensor]:
    made = torch.Generator().manual_seed(4)
    padded = torch.randn(len(LENGTHS), LONGEST, WIDTH, dtype=torch.float64, generator=made)
    packed = pack_padded_sequence(padded, torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    return packed, torch.randn(len(LENGTHS), WIDTH, dtype=torch.float64, generator=made)


def recurrent() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Recurrent().double(), nn.Sequential(Recurrent().double(), Last())]


def run_packed(split: Any) -> dict[str, Any]:
    packed, target = packed_batch()
    with penstock.Pipeline(
        recurrent(), microbatches=3, loss_fn=F.mse_loss, batch_options=penstock.BatchOptions(split=split), timeout=20
    ) as pipe:
        result = pipe.step(packed, target=target, outputs=True)
        gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        return {"loss": result.loss, "output": result.output, "gradients": gradients}


def attempt(function: Any) -> str:
    try:
        function()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_a_rank() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    with classifier() as pipe:
        found["classes"] = trained(pipe, 0)
    with tagger() as pipe:
        found["tags"] = trained(pipe, 1)
    with tagger(inputs="first") as pipe:
        found["first"] = trained(pipe, 1, passes=rank == 0)
        ids, lengths, _, labels = batch()
        wrong: Any = ((ids,), {"lengths": lengths * 9, "target": labels}) if rank == 0 else ((), {})
        found["wrong"] = attempt(lambda: pipe.step(*wrong[0], **wrong[1]))
    with tagger() as pipe:
        ids, lengths, _, labels = batch(rank)
        found["apart"] = attempt(lambda: pipe.step(ids, lengths=lengths, target=labels))
    found["packed"] = run_packed(None)
    found["packed by tokens"] = run_packed(penstock.by_tokens(lengths=0, sequences=()))
    return found


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    found: Ranks = on_processes(2, on_a_rank)
    return found


def close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for one, other in zip(found["losses"], wanted["losses"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert found["gradients"]
    for name, gradient in found["gradients"].items():
        torch.testing.assert_close(gradient, wanted["gradients"][name], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_classifier_is_that_of_the_whole_padded_batch(ranks: Ranks) -> None:
    wanted = plainly(Classify, F.cross_entropy, 0)
    with classifier() as pipe:
        here = trained(pipe, 0)
    for found in [here, *(rank["classes"] for rank in ranks)]:
        close(found, wanted)
        assert found["counts"] == [4, 4]
    outputs = [here["output"], *(rank["classes"]["output"] for rank in ranks)]
    assert outputs[1] is None
    for output in (outputs[0], outputs[2]):
        torch.testing.assert_close(output, wanted["output"], rtol=1e-10, atol=1e-12)  # rows as they came


def test_a_tagger_weighs_by_tokens_whoever_passes_the_batch(ranks: Ranks) -> None:
    wanted = plainly(Tag, tag_loss, 1)
    valid = torch.arange(LONGEST) < wanted["lengths"][:, None]
    with tagger() as pipe:
        here = trained(pipe, 1)
    for found in [here, *(rank["tags"] for rank in ranks), *(rank["first"] for rank in ranks)]:
        close(found, wanted)
        assert found["counts"][0] > 1
    for output in (here["output"], ranks[1]["tags"]["output"], ranks[1]["first"]["output"]):
        assert output.shape == (len(LENGTHS), LONGEST, CLASSES)
        torch.testing.assert_close(output[valid], wanted["output"][valid], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [classifier, tagger])
def test_padding_never_leaks(make: Any) -> None:
    """Whatever padding consists of, losses and gradients have the same bits."""

    def seen(filling: int) -> tuple[Tensor | None, list[Tensor]]:
        ids, lengths, classes, tags = batch(0, filling)
        with make() as pipe:
            loss = pipe.step(ids, lengths=lengths, target=classes if make is classifier else tags).loss
            return loss, [p.grad for p in pipe.parameters() if p.grad is not None]

    loss, gradients = seen(0)
    other, others = seen(VOCABULARY - 1)
    assert torch.equal(loss, other)  # type: ignore[arg-type]
    used = torch.zeros(VOCABULARY, dtype=torch.bool)
    ids, lengths, *_ = batch(0)
    used[ids[torch.arange(LONGEST) < lengths[:, None]]] = True
    for one, two in zip(gradients, others, strict=True):
        assert torch.equal(one, two)
        if one.shape == (VOCABULARY, WIDTH):
            assert not one[~used].any()


@pytest.mark.parametrize("split", [None, penstock.by_tokens(lengths=0, sequences=())])
def test_packed_sequences_are_split_and_cross_as_they_are(split: Any, ranks: Ranks) -> None:
    packed, target = packed_batch()
    model = nn.Sequential(*recurrent())
    output = model(packed)
    loss = F.mse_loss(output, target)
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    name = "packed" if split is None else "packed by tokens"
    for found in [run_packed(split), *(rank[name] for rank in ranks)]:
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=1e-12)
        for parameter, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, wanted[parameter], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ranks[1][name]["output"], output.detach(), rtol=1e-10, atol=1e-12)


def test_a_mistake_with_lengths_is_told_to_all_ranks(ranks: Ranks) -> None:
    assert ranks[0]["wrong"].startswith("ModelError: row")
    assert "more than max_tokens=16" in ranks[0]["wrong"]
    assert ranks[1]["wrong"].startswith("PeerFailure: rank 0 failed")
    assert all("different size or with different lengths" in rank["apart"] for rank in ranks)


def test_parity_goes_by_tokens_too() -> None:
    ids, lengths, classes, _ = batch()
    options = {
        "microbatches": 4,
        "loss_fn": F.cross_entropy,
        "batch_options": penstock.BatchOptions(split=penstock.by_tokens()),
        "schedule": "zb-h1",
    }
    assert penstock.parity(stages(Classify), ids, lengths=lengths, target=classes, pipeline=options).exact
    options["batch_options"] = penstock.BatchOptions(split=penstock.by_tokens(16))
    assert penstock.parity(stages(Classify), ids, lengths=lengths, target=classes, pipeline=options).exact


def test_a_mask_or_a_function_may_say_how_long_rows_are() -> None:
    ids, lengths, *_ = batch()
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    plans = [
        penstock.by_tokens(16).plan((ids,), {"lengths": lengths}, 1, False),
        penstock.by_tokens(16, lengths="mask").plan((ids,), {"mask": mask}, 1, False),
        penstock.by_tokens(16, lengths="mask").plan((ids,), {"mask": mask.bool()}, 1, False),
        penstock.by_tokens(16, lengths=1).plan((ids, lengths), {}, 1, False),
        penstock.by_tokens(16, lengths=lambda ids, **_: (ids != 0).sum(1)).plan((ids,), {"more": 1}, 1, False),
    ]
    assert all(plan == plans[0] for plan in plans)
    holes = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    plan = penstock.by_tokens(lengths="mask").plan((), {"mask": holes}, 2, True)
    assert plan == LengthPlan(((1,), (0,)), (1, 4))  # up to the last that counts


def test_the_number_of_microbatches_follows_the_batch() -> None:
    with tagger(microbatches=2) as pipe:
        ids, lengths, _, labels = batch()
        counts = []
        with pipe.record() as timeline:
            for rows in (len(ids), 2, 2, 5):
                pipe.step(ids[:rows], lengths=lengths[:rows], target=labels[:rows])
                counts.append(pipe.microbatches)
        assert counts[1] == counts[2] == 2
        assert counts[0] > counts[3] >= 2
        assert timeline.schedule.microbatches == counts[3]
        assert {span.action.microbatch for span in timeline.spans} == set(range(counts[3]))
        assert pipe.evaluate(ids, lengths=lengths, target=labels).loss is not None
        assert pipe.predict(ids[:1], lengths=lengths[:1]).shape == (1, lengths[0], CLASSES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": None}, "by_tokens reads 'lengths', which this call does not pass; it has 0"),
        (
            {"lengths": LENGTHS},
            "'lengths' is a list; pass a tensor, which is cut with the batch",
        ),
        (
            {"lengths": torch.rand(10)},
            r"'lengths' has shape \(10,\) and dtype torch.float32; by_tokens takes one whole",
        ),
        ({"lengths": torch.ones(2, 2, 2)}, r"'lengths' has shape \(2, 2, 2\)"),
        ({"lengths": torch.tensor([-1] * 10)}, "'lengths' says that row 0 has -1 tokens"),
        ({"lengths": torch.tensor([13] * 10)}, "0 has 12 tokens along dimension 1, but the longest row has 13"),
        ({"lengths": torch.tensor([2] * 3)}, "fewer than the 4 microbatches"),
        ({"lengths": torch.tensor([2] * 9)}, "0 has 10 rows along dimension 0, but there are 9 lengths"),
    ],
)
def test_lengths_that_do_not_fit_are_errors(change: dict[str, Any], message: str) -> None:
    ids, lengths, classes, _ = batch()
    given = {"lengths": lengths, **change}
    with classifier() as pipe, pytest.raises((ModelError, UsageError), match=message):
        pipe.step(ids, target=classes, **{name: value for name, value in given.items() if value is not None})


def test_arguments_that_cannot_work_are_refused() -> None:
    for wrong in (0, -3, 2.5, True):
        with pytest.raises(UsageError, match="max_tokens="):
            penstock.by_tokens(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="lengths="):
        penstock.by_tokens(lengths=2.5)  # type: ignore[arg-type]
    for wrong in ("ids", {"ids": None}, 3):
        with pytest.raises(UsageError, match="sequences="):
            penstock.by_tokens(sequences=wrong)
    with pytest.raises(UsageError, match="from a value or file has its number; leave max_tokens out"):
        penstock.Pipeline(
            stages(Tag), schedule=build("1f1b", 4, 4), batch_options=penstock.BatchOptions(split=penstock.by_tokens(8))
        )
    with pytest.raises(UsageError, match="say how many microbatches"):
        penstock.Pipeline(stages(Tag), batch_options=penstock.BatchOptions(split=penstock.by_tokens()))
    split = penstock.by_tokens(16, sequences=(0, "target"))
    ids, lengths, _, labels = batch()
    with tagger(split=split) as pipe:
        with pytest.raises(PeerFailure, match="name the output among by_tokens' sequences"):
            pipe.predict(ids, lengths=lengths)
        pipe.step(ids, lengths=lengths, target=labels)
    slip = penstock.by_tokens(16, sequences=(0, "taget"))
    with (
        tagger(split=slip) as pipe,
        pytest.raises(UsageError, match="name 'taget', which this call does not pass"),
    ):
        pipe.step(ids, lengths=lengths, target=labels)
    turned = penstock.by_tokens(16, sequences={0: 0})
    with (
        tagger(split=turned) as pipe,
        pytest.raises(UsageError, match="padded along dimension 0, but it has shape"),
    ):
        pipe.step(ids, lengths=lengths, target=labels)


class FromDict(Embed):
    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(batch["ids"], batch["lengths"]), batch["lengths"]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend, self.classify = Attend().double(), Classify().double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.classify(self.attend(x, lengths), lengths)
        return out


def test_a_dict_of_everything_is_a_batch_too() -> None:
    ids, lengths, classes, _ = batch()
    torch.manual_seed(0)
    modules = [FromDict().double(), Both()]
    wanted = F.cross_entropy(modules[1](*modules[0]({"ids": ids, "lengths": lengths})), classes)
    split = penstock.by_tokens(16, lengths=lambda batch: batch["lengths"])
    with penstock.Pipeline(modules, loss_fn=F.cross_entropy, batch_options=penstock.BatchOptions(split=split)) as pipe:
        found = pipe.step({"ids": ids, "lengths": lengths}, target=classes)
        torch.testing.assert_close(found.loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        with pytest.raises(ModelError, match="0 has 20 entries along dimension 1, but 0 is padded to 12"):
            pipe.step({"ids": ids, "lengths": lengths, "more": torch.zeros(10, 20)}, target=classes)


def test_a_schedule_of_a_fixed_number_goes_by_length_within_it() -> None:
    ids, lengths, classes, _ = batch()
    with penstock.Pipeline(
        stages(Classify),
        schedule=build("gpipe", 4, 5),
        loss_fn=F.cross_entropy,
        batch_options=penstock.BatchOptions(split=penstock.by_tokens()),
    ) as pipe:
        loss = pipe.step(ids, lengths=lengths, target=classes).loss
        model = Whole(copy.deepcopy(stages(Classify)))
        torch.testing.assert_close(loss, F.cross_entropy(model(ids, lengths), classes).detach(), rtol=1e-12, atol=1e-12)
