"""What went wrong in other pipelines, and in this one: scales, and state that stays behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bugs.small import WIDTH, batch, check, gradients, linears, of_the_whole_batch, pipeline
from exactness.live import Live
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import LossOptions
from penstock.errors import PeerFailure, ScheduleError
from penstock.schedule import Op, Schedule, build, lower


def test_two_steps_give_twice_the_gradient() -> None:
    """The accumulated `.grad` was divided after every step, so two steps gave 1.25 times the first's."""
    pipe, (x, y) = pipeline(), batch()
    pipe.step(x, target=y)
    once = gradients(pipe)
    pipe.step(x, target=y)
    pipe.step(x, target=y)
    torch.testing.assert_close(gradients(pipe), [None if g is None else 2 * g for g in once], rtol=1e-12, atol=1e-12)


def test_a_parameter_tied_between_two_stages_of_a_rank_is_not_scaled_twice() -> None:
    """Under a V, stages 0 and 3 share a rank; each of them divided the one gradient."""
    stages: list[Any] = linears()
    stages[3].weight = stages[0].weight
    check(pipeline(stages, "zb-v"))
    stages = linears()
    stages[2].weight = stages[0].weight  # and in a loop, where stage 0 meets stage `ranks`
    check(pipeline(stages, "interleaved-1f1b", ranks=2))


def test_an_evaluation_between_steps_neither_divides_nor_loses_gradients() -> None:
    """`eval()` divided what was there by the number of microbatches, or set it to None."""
    pipe, (x, y) = pipeline(schedule="zb-v"), batch()
    pipe.step(x, target=y)
    pipe.evaluate(x, target=y)
    torch.testing.assert_close(gradients(pipe), of_the_whole_batch(pipe, x, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [10, 9, 4])
def test_a_batch_that_does_not_divide_is_weighed_by_its_rows(rows: int) -> None:
    """A crash, M times the gradient, or a mean of means."""
    check(pipeline(), rows)


def test_a_share_of_a_third_is_a_third_in_double_precision() -> None:
    """Ours: the shares were float32 tensors, cast to the loss's type: 0.33333334 in a double."""
    check(pipeline(microbatches=3), rows=9)


def test_a_microbatch_of_nothing_but_ignored_tokens_does_not_make_the_loss_nan() -> None:
    """Its mean is nan, its share 0, and 0 * nan is nan."""
    pipe = pipeline(
        loss_fn=F.cross_entropy, loss_options=LossOptions(weight=lambda y: (y != -100).sum()), microbatches=2
    )
    x, y = batch(4)[0], torch.tensor([-100, -100, 1, 2])
    result = pipe.step(x, target=y)
    model = nn.Sequential(*pipe.deployment.ranks.modules().values())
    found = gradients(pipe)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    torch.testing.assert_close(found, gradients(pipe))


def test_the_first_step_does_not_run_the_model_on_made_up_data() -> None:
    """Shapes were found by running the model on uninitialised memory; BatchNorm kept what it saw there."""

    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.runs = nn.BatchNorm1d(WIDTH).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            out: Tensor = self.norm(x)
            return out

    stages: list[Any] = [Strict() for _ in range(2)]
    pipe, (x, y) = pipeline(stages), batch()
    pipe.step(x, target=y)
    assert [stage.runs for stage in stages] == [4, 4]
    assert [int(stage.norm.num_batches_tracked) for stage in stages] == [4, 4]
    pipe.evaluate(x, target=y)
    assert [int(stage.norm.num_batches_tracked) for stage in stages] == [4, 4]


def test_a_failed_step_leaves_nothing_for_the_next() -> None:
    """Losses of the failed step were still in the list, and were read as the next step's."""

    class Fails(nn.Linear):
        fail = True

        def forward(self, input: Tensor) -> Tensor:
            if self.fail:
                raise ValueError("on purpose")
            return super().forward(input)

    stages = linears()
    stages[1] = Fails(WIDTH, WIDTH).double()
    pipe, (x, y) = pipeline(stages), batch()
    for _ in range(2):
        with pytest.raises(PeerFailure, match=r"stage 1, action 1F0, microbatch 0\): ValueError: on purpose"):
            pipe.step(x, target=y)
    stages[1].fail = False
    check(pipe)


def test_losses_and_outputs_belong_to_their_microbatch_in_any_order() -> None:
    """Stored in the order they came, read by number; a legal order trained wrongly."""
    order = Schedule.from_text("0F1 0F0 0F2 0B1 0B2 0B0\n1F1 1B1 1F0 1F2 1B2 1B0")
    pipe = pipeline(linears(2), order)
    x, y = batch(7)  # microbatches of 3, 2 and 2 rows: a seed of another microbatch would not even fit
    result = pipe.step(x, target=y, outputs=True)
    found = gradients(pipe)
    model = nn.Sequential(*pipe.deployment.ranks.modules().values())
    torch.testing.assert_close(result.output, model(x).detach())
    wanted = [F.mse_loss(model(a), b).detach() for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True)]
    torch.testing.assert_close(list(result.losses), wanted)
    torch.testing.assert_close(found, of_the_whole_batch(pipe, x, y), rtol=1e-12, atol=1e-12)


def test_a_lowered_file_with_two_sends_swapped_is_refused() -> None:
    """A file with transfers was run as it was; two swapped messages of one shape trained wrongly."""
    lowered = lower(build("gpipe", 2, 2))
    rows = [[action for action in row if action is not None] for row in lowered.rows]
    sends = [position for position, action in enumerate(rows[0]) if action.op is Op.SEND_F]
    first, second = sends
    rows[0][first], rows[0][second] = rows[0][second], rows[0][first]
    wrong = Schedule(rows, placement=lowered.placement, microbatches=2, topology=lowered.topology)
    with pytest.raises(ScheduleError):
        pipeline(linears(2), wrong)


def test_memory_does_not_grow_with_the_number_of_microbatches() -> None:
    """Buffers for all microbatches at once, sends kept to the end, GPipe's peak kept for ever."""
    peaks = []
    for count in (6, 24):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
        x, y = torch.randn(count * 4, 16), torch.randn(count * 4, 16)
        pipe = pipeline(stages, microbatches=count)
        pipe.step(x, target=y)
        live = Live(pipe, (x, y)).watch()
        pipe.step(x, target=y)
        peaks.append([ledger.peak for ledger in live.ledgers.values()])
    message = 4 * 16 * 4  # bytes: on threads it is alive until the other rank, too, is done with it
    kept = 24 * 8  # a microbatch's loss
    assert all(many <= few + kept + message for few, many in zip(*peaks, strict=True))


def test_the_losses_of_a_step_are_small() -> None:
    """Ours: mse_loss returns a scalar in a storage as large as its input, so keeping M losses kept M outputs."""
    pipe, (x, y) = pipeline(linears(2)), batch()
    sizes: list[int] = []
    last = pipe.deployment.ranks.last
    assert last is not None

    def look(action: Any, context: Any) -> None:
        context.run(action)
        sizes.extend(loss.untyped_storage().nbytes() for loss in last.computations.losses.values())

    pipe.register(Op.B, look)
    pipe.step(x, target=y)
    assert set(sizes) == {8}


def test_an_inference_keeps_no_output_that_was_not_asked_for() -> None:
    """Forward-only runs never emptied the forward cache."""
    pipe, (x, _) = pipeline(), batch()
    for _ in range(3):
        pipe.evaluate(x)
        for executor in pipe.deployment.ranks.executors.values():
            assert executor.computations.outputs.take() is None
            assert all(not stage.saved for stage in executor.stages.values())


@dataclass
class Bundle:
    hidden: Tensor
    step: int = 0


class Bundles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Any) -> Any:
        return self.linear(x.hidden) if isinstance(x, Bundle) else Bundle(self.linear(x))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_object_that_hides_tensors_from_torch_is_refused(ranks: int) -> None:
    """A1: it crossed as a plain value: between processes stage 0 got no gradient, and the loss was right."""
    x, y = batch()
    with pytest.raises(PeerFailure, match=r"stage 0 returns a \S*Bundle that holds tensors, .*register_dataclass"):
        pipeline([Bundles(), Bundles()], "looped-bfs" if ranks == 1 else "1f1b", ranks=ranks).step(x, target=y)


class Tagged(nn.Module):
    """Plain values beside a tensor are no reason to refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Any) -> Any:
        extras = (Op.F, torch.float64, torch.Size([2]), 1.5, None, Path("b"), {3}, b"c")
        if isinstance(x, dict):
            assert x["extras"] == extras
            return self.linear(x["hidden"])
        return {"hidden": self.linear(x), "extras": extras}


def test_plain_values_of_all_kinds_still_cross() -> None:
    check(pipeline([Tagged(), Tagged()]))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v"])  # zb-v: also on one rank
def test_a_stage_may_begin_in_place(schedule: str, recompute: str) -> None:
    """C1: "a leaf Variable that requires grad is being used in an in-place operation", as of any cut CNN."""
    stages: list[nn.Module] = [
        nn.Sequential(nn.ReLU(inplace=True), linear) if number else linear for number, linear in enumerate(linears())
    ]
    pipe, (x, y) = pipeline(stages, schedule, ranks=2, recompute=recompute), batch()
    for _ in range(2):  # copies in the first forward show that the stage writes; the second step goes by that
        pipe.step(x, target=y)
        torch.testing.assert_close(gradients(pipe), of_the_whole_batch(pipe, x, y), rtol=1e-12, atol=1e-12)
    assert torch.equal(pipe.evaluate(x, target=y).loss, pipe.evaluate(x, target=y).loss)  # type: ignore[arg-type]


def test_a_stage_that_does_not_write_is_handed_the_value_itself() -> None:
    """The copies of C1 are for the first forward only: later, they would be held until the backward."""
    seen: list[bool] = []
    stages: list[Any] = linears(2)
    stages[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].is_leaf))
    pipe, (x, y) = pipeline(stages), batch()
    pipe.step(x, target=y)
    pipe.step(x, target=y)
    assert seen == [False] + [True] * 7


class WritesLater(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH).double(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x.mul_(2) if self.calls > 1 else x)
        return out


@pytest.mark.parametrize("frozen", [False, True])
def test_a_stage_that_begins_to_write_later_is_told_what_to_do(frozen: bool) -> None:
    x, y = batch()
    with pytest.raises(PeerFailure, match=r"received was written to in place while stage 1 ran.*clone\(\)"):
        pipeline([linears()[0].requires_grad_(not frozen), WritesLater()]).step(x, target=y)


class Counter(nn.Module):
    """Sends its count along, from a buffer or a plain attribute: the memory itself."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        count = torch.zeros((), dtype=torch.float64)
        self.register_buffer("count", count) if registered else setattr(self, "count", count)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return self.linear(x), self.count


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        self.seen.append(count.item())
        return x * count


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_count_that_is_sent_does_not_change_under_way(ranks: int, registered: bool) -> None:
    """A5: all stages of gpipe went forward first, so that every microbatch came with the last one's count."""
    times, (x, y) = Times(), batch()
    pipeline([Counter(registered), times], "looped-bfs" if ranks == 1 else "gpipe", ranks=ranks).step(x, target=y)
    assert times.seen == [1, 2, 3, 4]
