"""What went wrong in other pipelines with batches, boundaries and placements, and in this one while it was built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bugs.small import WIDTH, batch, check, gradients, linears, pipeline
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import BatchOptions, CutOptions
from penstock.errors import ModelError
from penstock.schedule import Op, build, lower


def test_the_last_stage_may_return_a_dict() -> None:
    """The note said "anything", the check refused dicts."""

    class Named(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return {"logits": super().forward(input), "count": len(input)}

    stages = [*linears(1), Named(WIDTH, WIDTH).double()]
    pipe, (x, y) = pipeline(stages, loss_fn=lambda out, target: F.mse_loss(out["logits"], target)), batch()
    assert pipe.step(x, target=y, outputs=True).output["logits"].shape == (8, WIDTH)


def test_three_rows_for_four_microbatches_is_one_clear_error() -> None:
    """ValueError on one rank, AssertionError on the other."""
    x, y = batch(3)
    with pytest.raises(ModelError, match="3 rows, fewer than the 4 microbatches; pass a larger batch or at most"):
        pipeline().step(x, target=y)


def test_evaluation_runs_on_a_v_without_a_target_and_with_other_shapes() -> None:
    """A crash on the V schedules, a TypeError without a target, wrong rows for shorter inputs."""
    pipe, (x, y) = pipeline(schedule="zb-v"), batch()
    pipe.step(x, target=y)
    model = nn.Sequential(*pipe.deployment.ranks.modules().values())
    for rows in (1, 3, 8, 21):
        wider = torch.randn(rows, 3, WIDTH).double()
        torch.testing.assert_close(pipe.predict(wider), model(wider).detach())


def test_a_batch_may_be_along_the_last_dimension() -> None:
    """-1 meant "do not split", and a keyword that was missing in the spec was a KeyError."""

    class Columns(nn.Linear):
        def forward(self, input: Tensor, shift: Any = 0) -> Tensor:
            return super().forward(input.t()).t() + shift

    torch.manual_seed(0)
    stages = [Columns(WIDTH, WIDTH).double() for _ in range(2)]
    pipe = pipeline(stages, batch_options=BatchOptions(dims={0: -1, "target": -1, "output": -1}))
    x, y = (value.t() for value in batch())
    result = pipe.step(x, target=y, shift=2.0, outputs=True)
    assert result.output.shape == (WIDTH, 8)
    torch.testing.assert_close(result.output, (stages[1](stages[0](x, 2.0), 2.0)).detach())


def test_microbatches_do_not_share_a_dict() -> None:
    """`[{}] * n`, one object for all microbatches; a default list that grew from call to call."""

    class Marks(nn.Linear):
        def forward(self, input: Tensor, notes: dict[str, Any] | None = None) -> Tensor:
            assert notes is not None
            assert "seen" not in notes
            notes["seen"] = True
            return super().forward(input)

    torch.manual_seed(0)
    pipe, (x, y) = pipeline([Marks(WIDTH, WIDTH).double()]), batch()
    mine: dict[str, Any] = {}
    for _ in range(2):
        pipe.step(x, target=y, notes=mine)
    assert mine == {}


def test_integers_cross_a_boundary_and_one_rank_needs_no_wire() -> None:
    """Received tensors all required gradients, in float32; a lone rank sent to itself."""

    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH).double()

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.table(ids)
            return out

    class Same(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return ids + 1

    torch.manual_seed(0)
    for ranks in (3, 1):
        pipe = pipeline([Same(), Same(), Ids()], ranks=ranks)
        ids, (_, y) = torch.arange(8) % 3, batch()
        assert pipe.step(ids, target=y).loss.dtype is torch.float64
        found = gradients(pipe)
        F.mse_loss(nn.Sequential(*pipe.deployment.ranks.modules().values())(ids), y).backward()
        torch.testing.assert_close(found, gradients(pipe), rtol=1e-12, atol=1e-12)


def test_a_rank_may_own_any_stages_in_any_order() -> None:
    """The own rank was guessed from the first stage's number, and a rank ran another one's list."""
    order = build("zb-v", 2, 4)
    assert order.placement.stages_of(0) == (0, 3)
    check(pipeline(schedule=order))


def test_the_reduction_of_gradients_comes_after_the_last_backward_in_time() -> None:
    """It hung on the number of the last microbatch, which runs first where the order is reversed."""
    pipe, (x, y) = pipeline(schedule=lower(build("looped-bfs", 2, 4), reduce=True)), batch()
    log: list[tuple[Op, int]] = []
    for op in (Op.B, Op.REDUCE_GRAD):
        pipe.register(op, lambda action, context: (log.append((action.op, action.stage)), context.run(action))[1])
    pipe.step(x, target=y)
    for stage in range(4):
        mine = [op for op, number in log if number == stage]
        assert mine == [Op.B] * 4 + [Op.REDUCE_GRAD]


def test_a_skip_works_under_1f1b() -> None:
    """The operations were sorted against deadlock with skips, and 1F1B used the unsorted list."""

    class Fork(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            out = super().forward(input)
            return penstock.Routed(out, {3: out})

    class Join(nn.Linear):
        def forward(self, input: Tensor, early: Tensor) -> Tensor:
            return super().forward(input) * early

    stages = linears()
    stages[0], stages[3] = Fork(WIDTH, WIDTH).double(), Join(WIDTH, WIDTH).double()
    pipe, (x, y) = pipeline(stages, cut_options=CutOptions(skips=[(0, 3)])), batch()
    pipe.step(x, target=y)
    found = gradients(pipe)
    early = F.linear(x, stages[0].weight, stages[0].bias)
    F.mse_loss(stages[3](stages[2](stages[1](early)), early), y).backward()
    torch.testing.assert_close(found, gradients(pipe), rtol=1e-12, atol=1e-12)


def test_a_layer_that_is_used_twice_is_not_lost() -> None:
    """`named_children` names a module once, so one ReLU used everywhere was cut out of the model but for its first."""
    torch.manual_seed(0)
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), relu, nn.Linear(WIDTH, WIDTH), relu).double()
    pipe, (x, _) = penstock.Pipeline(model, stages=2, microbatches=2), batch()
    torch.testing.assert_close(pipe.predict(x), model(x).detach())
    assert (pipe.predict(x) >= 0).all()


def test_an_evaluation_before_training_does_not_teach_that_dropout_draws_nothing() -> None:
    """That a stage does not draw was remembered by stage number for all pipelines and modes of the process."""
    x = torch.randn(8, WIDTH)
    for _ in range(2):
        torch.manual_seed(0)
        pipe = penstock.Pipeline(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)],
            microbatches=4,
            loss_fn=F.mse_loss,
        )
        pipe.evaluate(x, target=x)
        pipe.step(x, target=x)
        pipe.eval()
        pipe.step(x, target=x)
        pipe.train()
        pipe.step(x, target=x)


@pytest.mark.slow
def test_a_checkpoint_on_one_thread_is_not_taken_for_a_draw_on_another() -> None:
    """Its backward sets the process's generator and puts it back; ranks beside it saw it move and refused to go on."""

    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
            return out

    x = torch.randn(32, 32)
    for _ in range(5):
        pipe = penstock.Pipeline([Checked() for _ in range(4)], microbatches=16, loss_fn=F.mse_loss)
        for _ in range(3):
            pipe.step(x, target=x)
        pipe.close()


@pytest.mark.parametrize("schedule", ["interleaved-zb", "zb-v"])
def test_the_microbatch_that_is_not_recomputed_adds_its_gradient_in_its_turn(schedule: str) -> None:
    """With recompute="except_last" the last microbatch was the first to be recorded: nothing was known about the
    weights yet, so its gradients came with I, before those of earlier microbatches: right, but other bits."""
    found = []
    for recompute in ("never", "except_last"):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        pipe = penstock.Pipeline(
            stages, microbatches=4, schedule=schedule, ranks=2, loss_fn=F.mse_loss, recompute=recompute
        )
        x, y = (value.float() for value in batch())
        pipe.step(x, target=y)
        found.append(gradients(pipe))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)
