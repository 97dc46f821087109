"""The same face on processes: who passes the batch, who is told what, and what one rank's mistake does to the others.

One group of two processes runs all scenarios; each returns what its rank saw, and the tests look at that.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deadlines import SOON, TIMEOUT
from processes import on_processes
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import BatchOptions, Microbatches, Shared
from penstock.errors import PenstockError

WIDTH = 4


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor, mask: Tensor, table: Tensor | None = None) -> Tensor:
        out = torch.where(mask, self.drop(self.linear(x)), x)
        return out if table is None else out + table.sum()


class Balanced(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        penstock.add_loss("balance", out.pow(2).mean())
        return torch.tanh(out)


class Loss(nn.Module):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(x, labels)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Balanced(WIDTH, WIDTH), Masked(), Balanced(WIDTH, WIDTH), Masked()]


def batch(rows: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(4)
    x, y = torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made)
    return x, torch.rand(rows, 1, generator=made) > 0.4, y


def pipeline(transport: str | None = None, **options: Any) -> penstock.Pipeline:
    given = {"microbatches": 3, "loss_fn": F.mse_loss, "schedule": "zb-v", "seed": 3, "timeout": TIMEOUT, **options}
    return penstock.Pipeline(given.pop("stages", stages()), transport=transport, **given)


def seen(pipe: penstock.Pipeline, result: penstock.StepResult) -> dict[str, Any]:
    gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.zero_grad()
    return {
        "loss": result.loss,
        "losses": torch.stack(result.losses),
        "extra": dict(result.extra_losses),
        "gradients": gradients,
    }


def attempt(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """The kind of error, its text and how long it took; all ranks begin together."""
    dist.barrier()
    begin = time.monotonic()
    try:
        function(*args, **kwargs)
    except PenstockError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


# --- the scenarios, each on every rank


def every_rank_passes_the_batch(rank: int) -> Any:
    x, mask, y = batch()
    with pipeline() as pipe:
        return [seen(pipe, pipe.step(x, target=y, mask=mask)) for _ in range(2)]


def only_the_first_passes_it(rank: int) -> Any:
    x, mask, y = batch()
    with pipeline(batch_options=BatchOptions(inputs="first")) as pipe:
        given: Any = ((x,), {"target": y, "mask": mask}) if rank == 0 else ((), {})
        return [seen(pipe, pipe.step(*given[0], **given[1])) for _ in range(2)]


def first_passes_ready_and_shared_values(rank: int) -> Any:
    x, mask, y = batch()
    table = torch.arange(3.0)
    ready = [Microbatches(value.tensor_split(3)) for value in (x, mask, y)]
    with pipeline(batch_options=BatchOptions(inputs="first")) as pipe:
        if rank:
            return seen(pipe, pipe.step())
        return seen(pipe, pipe.step(ready[0], mask=ready[1], target=ready[2], table=Shared(table)))


def model_loss_of_a_ragged_batch(rank: int) -> Any:
    """Here the last rank is given nothing that tells how many rows a microbatch has."""
    x, _, y = batch()
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), Loss()]
    with pipeline(stages=modules, batch_options=BatchOptions(inputs="first"), loss_fn=None, schedule="1f1b") as pipe:
        labels = {"labels": Microbatches([{"y": part}["y"] for part in y.tensor_split(3)])}
        result = pipe.step(*((x,) if rank == 0 else ()), **(labels if rank == 0 else {}))
        return seen(pipe, result)


def mistakes_with_one_batch(rank: int) -> Any:
    x, mask, y = batch()
    with pipeline(batch_options=BatchOptions(inputs="first")) as pipe:
        good = [((x,), {"target": y, "mask": mask}), ((), {})][rank]
        found = []
        for first, other in [
            (((x[:2],), {"target": y[:2], "mask": mask[:2]}), ((), {})),  # too few rows
            (((x,), {"target": y, "mask": mask, "colour": x}), ((), {})),  # a keyword that nobody takes
            (good, ((x,), {})),  # the other rank passes one as well
        ]:
            args, kwargs = (first, other)[rank] if rank else first
            found.append(attempt(pipe.step, *args, **kwargs))
            found.append(seen(pipe, pipe.step(*good[0], **good[1])))
            pipe.deployment.counter.step = 0
        args, kwargs = (((x,), {"mask": mask, "colour": x}), ((), {}))[rank]
        found.append(attempt(pipe.evaluate, *args, **kwargs))
        return found


def mistakes_with_a_batch_each(rank: int) -> Any:
    x, mask, y = batch()
    with pipeline() as pipe:
        found = []
        for args, kwargs in [
            ((x,), {"target": y[:5], "mask": mask}),  # the same mistake on both
            ((x,), {"target": y[:5] if rank == 1 else y, "mask": mask}),  # on one of them
        ]:
            found.append(attempt(pipe.step, *args, **kwargs))
            found.append(seen(pipe, pipe.step(x, target=y, mask=mask)))
            pipe.deployment.counter.step = 0
        rows = (2, 1)[rank]
        found.append(attempt(pipe.evaluate, x[:rows], target=y[:rows], mask=mask[:rows]))
        return found


def evaluations(rank: int) -> Any:
    x, mask, y = batch(11)
    with pipeline() as pipe:
        found = []
        for rows in (1, 2, 5, 11, 3):
            result = pipe.evaluate(x[:rows], target=y[:rows], mask=mask[:rows])
            found.append((result.loss, dict(result.extra_losses), pipe.predict(x[:rows], mask=mask[:rows])))
            pipe.step(x, target=y, mask=mask)
        return found, [buffer.clone() for _, buffer in pipe.named_buffers()]


def the_callers_random_numbers(rank: int) -> Any:
    x, mask, y = batch()
    torch.manual_seed(rank)
    wanted = torch.rand(3)
    torch.manual_seed(rank)
    found = [torch.rand(1)]
    with pipeline() as pipe:
        found = []
        torch.manual_seed(rank)
        found.append(torch.rand(1))
        pipe.step(x, target=y, mask=mask)
        found.append(torch.rand(1))
        pipe.evaluate(x, target=y, mask=mask)
        found.append(torch.rand(1))
    return torch.equal(torch.cat(found), wanted)


def a_rank_without_a_seed_takes_the_first_ranks(rank: int) -> Any:
    x, mask, y = batch()
    modules = stages()
    torch.manual_seed(100 + rank)
    with pipeline(stages=modules, seed=None) as pipe:
        return seen(pipe, pipe.step(x, target=y, mask=mask))


def its_part_of_the_state(rank: int) -> Any:
    with pipeline() as pipe:
        names = sorted(pipe.state_dict())
        pipe.load_state_dict({name: value + 1 for name, value in nn.ModuleList(stages()).state_dict().items()})
        wrong = attempt(pipe.load_state_dict, {"nothing": torch.ones(1)})
        return names, [value.clone() for value in pipe.state_dict().values()], wrong


SCENARIOS = [
    every_rank_passes_the_batch,
    only_the_first_passes_it,
    first_passes_ready_and_shared_values,
    model_loss_of_a_ragged_batch,
    mistakes_with_one_batch,
    mistakes_with_a_batch_each,
    evaluations,
    the_callers_random_numbers,
    a_rank_without_a_seed_takes_the_first_ranks,
    its_part_of_the_state,
]


def all_scenarios() -> dict[str, Any]:
    return {scenario.__name__: scenario(dist.get_rank()) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each rank saw."""
    return on_processes(2, all_scenarios)


def on_threads(**options: Any) -> list[dict[str, Any]]:
    x, mask, y = batch()
    with pipeline(transport="threads") as pipe:
        return [seen(pipe, pipe.step(x, target=y, mask=mask, **options)) for _ in range(2)]


def check(parts: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """All ranks were told the same as threads are; together they have the same gradients."""
    for part in parts:
        assert torch.equal(part["loss"], wanted["loss"])
        assert torch.equal(part["losses"], wanted["losses"])
        assert part["extra"] == pytest.approx(wanted["extra"], rel=1e-12)
    gradients = {name: gradient for part in parts for name, gradient in part["gradients"].items()}
    assert set(gradients) == set(wanted["gradients"])
    assert all(torch.equal(gradient, wanted["gradients"][name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("how", ["every_rank_passes_the_batch", "only_the_first_passes_it"])
def test_the_same_numbers_as_on_threads_whoever_passes_the_batch(told: list[dict[str, Any]], how: str) -> None:
    for step, wanted in enumerate(on_threads()):
        check([rank[how][step] for rank in told], wanted)


def test_ready_splits_and_shared_values_are_carried_too(told: list[dict[str, Any]]) -> None:
    wanted = on_threads(table=Shared(torch.arange(3.0)))[0]
    check([rank["first_passes_ready_and_shared_values"] for rank in told], wanted)


def test_the_rows_of_a_microbatch_are_carried_even_where_the_batch_is_not(told: list[dict[str, Any]]) -> None:
    x, _, y = batch()
    torch.manual_seed(0)
    wanted = F.mse_loss(nn.Linear(WIDTH, WIDTH)(x), y).detach()
    for rank in told:
        torch.testing.assert_close(rank["model_loss_of_a_ragged_batch"]["loss"], wanted)


def test_one_ranks_mistake_is_told_to_all_at_once_and_the_next_step_is_exact(told: list[dict[str, Any]]) -> None:
    wanted = on_threads()[0]
    first, other = (rank["mistakes_with_one_batch"] for rank in told)
    expected = [
        ("ModelError", "PeerFailure", "argument 0 has 2 rows, fewer than the 3 microbatches"),
        ("ModelError", "PeerFailure", "no stage takes the keyword argument 'colour'"),
        ("PeerFailure", "UsageError", "only rank 0 passes a batch to step(); rank 1 did too"),
    ]
    for number, (mine, theirs, words) in enumerate(expected):
        for (kind, text, seconds), name in ((first[2 * number], mine), (other[2 * number], theirs)):
            assert kind == name
            assert words in text
            assert seconds < SOON
        check([first[2 * number + 1], other[2 * number + 1]], wanted)
    assert (first[-1][0], other[-1][0]) == ("ModelError", "PeerFailure")
    assert max(first[-1][2], other[-1][2]) < SOON


def test_a_mistake_in_one_of_two_batches_likewise(told: list[dict[str, Any]]) -> None:
    wanted = on_threads()[0]
    first, other = (rank["mistakes_with_a_batch_each"] for rank in told)
    assert [(first[number][0], other[number][0]) for number in (0, 2, 4)] == [
        ("ModelError", "ModelError"),
        ("PeerFailure", "ModelError"),
        ("ModelError", "ModelError"),
    ]
    assert "'target' has 5 rows along dimension 0, but argument 0 has 7" in first[2][1]
    assert "batches of different size (rank, microbatches): [(0, 2), (1, 1)]" in first[4][1]
    assert max(found[number][2] for found in (first, other) for number in (0, 2, 4)) < SOON
    for number in (1, 3):
        check([first[number], other[number]], wanted)


def test_evaluations_of_any_size_between_steps(told: list[dict[str, Any]]) -> None:
    x, mask, y = batch(11)
    with pipeline(transport="threads") as pipe:
        for number, rows in enumerate((1, 2, 5, 11, 3)):
            result = pipe.evaluate(x[:rows], target=y[:rows], mask=mask[:rows])
            output = pipe.predict(x[:rows], mask=mask[:rows])
            for rank in told:
                loss, extra, predicted = rank["evaluations"][0][number]
                assert torch.equal(loss, result.loss)
                assert extra == pytest.approx(dict(result.extra_losses), rel=1e-12)
                assert predicted is None or torch.equal(predicted, output)
            assert told[0]["evaluations"][0][number][2] is not None  # the last stage of a V is on the first rank
            pipe.step(x, target=y, mask=mask)


def test_random_numbers_are_the_first_ranks_and_the_callers_are_untouched(told: list[dict[str, Any]]) -> None:
    assert [rank["the_callers_random_numbers"] for rank in told] == [True, True]
    x, mask, y = batch()
    modules = stages()
    torch.manual_seed(100)
    with pipeline(transport="threads", stages=modules, seed=None) as pipe:
        wanted = seen(pipe, pipe.step(x, target=y, mask=mask))
    check([rank["a_rank_without_a_seed_takes_the_first_ranks"] for rank in told], wanted)


def test_each_rank_has_its_part_of_the_state_under_the_whole_models_names(told: list[dict[str, Any]]) -> None:
    whole = nn.ModuleList(stages()).state_dict()
    names = [rank["its_part_of_the_state"][0] for rank in told]
    assert sorted(names[0] + names[1]) == sorted(whole)
    assert {name.split(".")[0] for name in names[0]} == {"0", "3"}
    for rank in told:
        _, values, wrong = rank["its_part_of_the_state"]
        own = [name for name in whole if name in rank["its_part_of_the_state"][0]]
        assert all(torch.equal(value, whole[name] + 1) for name, value in zip(own, values, strict=True))
        assert wrong[0] == "ModelError"
        assert "unknown ['nothing']" in wrong[1]


def _drop_pipelines() -> list[int]:
    """Build, use and drop pipelines on this rank; the threads that are alive after each."""
    alive = []
    for transport in [None, None, "distributed", "distributed"]:
        torch.manual_seed(0)
        stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
        pipe = penstock.Pipeline(stages, microbatches=2, loss_fn=F.mse_loss, transport=transport)
        x = torch.randn(4, 4)
        pipe.step(x, target=x)
        del pipe, stages
        gc.collect()
        watches = [thread for thread in threading.enumerate() if thread.name.startswith("penstock-watch")]
        for watch in watches:  # the finalizer tells them to end, and does not wait
            watch.join(TIMEOUT)
        alive.append(sum(watch.is_alive() for watch in watches))
    return alive


@pytest.mark.slow
def test_a_pipeline_that_is_dropped_without_close_takes_its_watch_with_it() -> None:
    """The thread of the watch held the rank's own methods, to ask what it does, and so the whole pipeline for good."""
    assert on_processes(2, _drop_pipelines) == [[0, 0, 0, 0]] * 2
