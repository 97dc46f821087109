"""`penstock.compat.pipelining`: torch's names, arguments and programs; and what torch gets wrong, right."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as theirs
import torch.distributed.pipelining.schedules as their_schedules
from compat import torch_shaped as programs
from processes import on_processes
from torch import nn

import penstock.compat.pipelining as ours
from penstock.compat.pipelining import schedules
from penstock.compat.pipelining.stage import _PipelineStageBase
from penstock.errors import NotationError, ScheduleError, UsageError
from penstock.schedule import build, verify

LISTED = [
    "PipelineStage",
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleFlexibleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
    "PipelineScheduleSingle",
    "PipelineScheduleMulti",
    "get_schedule_class",
    "pipeline",
    "SplitPoint",
    "Pipe",
    "TensorChunkSpec",
    "pipe_split",
    "build_stage",
    "_ScheduleForwardOnly",
]


def test_all_names_are_there() -> None:
    assert set(theirs.__all__) <= set(ours.__all__)
    for name in LISTED:
        assert getattr(ours, name)


@pytest.mark.parametrize("name", [each for each in LISTED if hasattr(theirs, each) or hasattr(their_schedules, each)])
def test_arguments_are_torchs_in_torchs_order(name: str) -> None:
    their = getattr(theirs, name, None) or getattr(their_schedules, name)
    if name in ("SplitPoint", "Pipe"):
        return
    wanted = [each for each in inspect.signature(their).parameters if each not in ("args", "kwargs")]
    have = list(inspect.signature(getattr(ours, name)).parameters)
    assert have[: len(wanted)] == wanted
    for method in ("step", "eval", "_load_csv", "_dump_csv", "register_custom_function"):
        if hasattr(their, method):
            wanted = list(inspect.signature(getattr(their, method)).parameters)
            assert set(wanted) <= set(inspect.signature(getattr(getattr(ours, name), method)).parameters)


def test_classes_are_found_by_name_in_any_case() -> None:
    assert ours.get_schedule_class("zbvzerobubble") is ours.ScheduleZBVZeroBubble
    assert ours.get_schedule_class("1F1B") is ours.Schedule1F1B
    with pytest.raises(UsageError, match="Unknown schedule name 'fifo'"):
        ours.get_schedule_class("fifo")


# -- programs of upstream's shape, on two processes


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = on_processes(2, programs.on_a_rank)
    return found


@pytest.mark.slow
def test_programs_of_torchs_shape_run_with_the_import_changed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["ran"] == [program.__name__ for program in programs.PROGRAMS]


@pytest.mark.slow
def test_what_is_wrong_on_one_rank_is_an_error_on_all(ranks: list[dict[str, Any]]) -> None:
    everything = list(zip(*(rank["refused"] for rank in ranks), strict=True))
    twice, placed, few, no_grad, losses, some, wrapped, *by_one = everything
    assert "the order runs stages [1] on rank 1, but it was given stages [0]" in twice[1]
    assert twice[0].startswith("UsageError: rank 1 cannot make its schedule")
    assert all("the order runs stages [" in each for each in placed)
    assert all("3 rows, fewer than the 8 microbatches" in each for each in few)
    assert all(each.startswith("RunError: step() requires gradients") for each in no_grad)
    assert all("losses must be a list but got a tuple" in each for each in losses)
    assert all("ranks [0] have no loss_fn" in each for each in some)
    assert all("is wrapped over the processes [0, 1], of which" in each for each in wrapped)
    for (on_first, on_last), (said, by) in zip(
        by_one,
        [
            ("losses must be a list but got a tuple", 1),
            ("args_chunk_spec has 2 entries for 1 positional arguments", 0),
            ("Forward-only schedule does not support loss computation", 1),
            ("unexpected keyword argument 'unknown'", 0),
            ("Expecting 4 arg_mbs but got 3", 0),
            ("stage 1 has another submod", 1),
        ],
        strict=True,
    ):
        own, told = (on_last, on_first) if by else (on_first, on_last)
        assert said in own
        assert told.startswith(f"PeerFailure: rank {by} failed: ")
        assert said in told


# -- in one process


def stages(count: int) -> list[ours.PipelineStage]:
    torch.manual_seed(0)
    return [ours.PipelineStage(nn.Linear(4, 4), index, count, "cpu") for index in range(count)]


def test_all_stages_may_be_in_one_process() -> None:
    made = stages(3)
    schedule = ours.ScheduleInterleaved1F1B(made, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    losses: list[Any] = []
    output = schedule.step(x, target=y, losses=losses)
    whole = nn.Sequential(*(stage.submod for stage in made))
    torch.testing.assert_close(output, whole(x).detach())
    torch.testing.assert_close(torch.stack(losses).mean(), nn.functional.mse_loss(whole(x), y).detach())
    before = [p.grad.clone() for p in whole.parameters() if p.grad is not None]
    whole.zero_grad()
    nn.functional.mse_loss(whole(x), y).backward()
    for found, wanted in zip(before, whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.grad)
    schedule.pipeline.clip_grad_norm_(1.0)  # what torch has no name for
    schedule.close()


def test_options_of_a_pipeline_are_at_hand() -> None:
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    schedule.options = {"recompute": "always", "precision": "bf16"}
    assert schedule.step(torch.randn(4, 4), target=torch.randn(4, 4)).dtype is torch.bfloat16
    assert schedule.pipeline.recompute == "always"


def test_microbatches_may_come_split() -> None:
    made = stages(2)
    schedule = ours.ScheduleInterleaved1F1B(made, 2, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    parts = [(part,) for part in x.split([1, 3])]
    output = schedule._step_microbatches(parts, None, list(y.split([1, 3])))
    torch.testing.assert_close(output, nn.Sequential(*(stage.submod for stage in made))(x).detach())
    with pytest.raises(ValueError, match="Expecting 2 arg_mbs but got 1"):
        schedule._step_microbatches(parts[:1], None, [y])
    with pytest.raises(TypeError, match="kwarg_mbs must be a list but got a dict"):
        schedule._step_microbatches(parts, {}, [y])


class Scaled(nn.Module):
    """Its arguments besides the first may be left out."""

    def forward(self, x: Any, shift: Any = None, scale: Any = None) -> Any:
        x = x if shift is None else x + shift
        return x if scale is None else x * scale


def test_each_microbatch_has_its_own_keywords_and_its_own_number_of_arguments() -> None:
    """Those of microbatch 0 decided for all: what others had beyond it was dropped, and what they lacked a KeyError."""
    made = [ours.PipelineStage(module, index, 2, "cpu") for index, module in enumerate((Scaled(), nn.Linear(4, 4)))]
    schedule = ours.ScheduleInterleaved1F1B(made, 3, loss_fn=nn.functional.mse_loss)
    x, y, shift = torch.randn(6, 4), torch.randn(6, 4), torch.randn(2, 4)
    parts: list[tuple[Any, ...]] = [(piece,) for piece in x.split(2)]
    parts[1] = (*parts[1], shift)
    named = [{}, {"scale": 3.0}, {"shift": 2 * shift}]
    output = schedule._step_microbatches(parts, named, list(y.split(2)))
    wanted = [Scaled()(*args, **kwargs) for args, kwargs in zip(parts, named, strict=True)]
    torch.testing.assert_close(output, made[1].submod(torch.cat(wanted)).detach())


def test_a_microbatch_that_is_no_tuple_of_arguments_is_refused() -> None:
    """Its rows would be taken for arguments."""
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    parts: Any = list(torch.randn(4, 4).split(2))
    with pytest.raises(UsageError, match=r"arg_mbs\[0\] is a Tensor; pass a tuple of arguments"):
        schedule._step_microbatches(parts, None, parts)


def test_arguments_of_the_loss_go_whole_to_each_microbatch() -> None:
    """As with torch; they were cut by rows where they happened to have as many as the batch."""
    seen: list[int] = []

    def loss(output: Any, target: Any, *, table: Any) -> Any:
        seen.append(len(table))
        return nn.functional.mse_loss(output, target)

    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=loss)
    schedule.step(torch.randn(4, 4), target=torch.randn(4, 4), loss_kwargs={"table": torch.ones(4)})
    assert seen == [4, 4]


def test_ranks_of_stages_are_those_of_the_order_or_refused() -> None:
    schedule = schedules._PipelineScheduleRuntime(
        stages(2), 2, loss_fn=nn.functional.mse_loss, stage_index_to_group_rank={0: 0, 1: 1}
    )
    rows = ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]
    schedule.pipeline_order = {0: [schedules._Action.from_str(cell) for cell in rows]}
    with pytest.raises(UsageError, match="has stage 1 on rank 1, but the order runs it on rank 0"):
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))


def test_files_of_torch_load_and_run(tmp_path: Path) -> None:
    class Mock:
        def __init__(self) -> None:
            self.num_stages, self.group_size, self.group_rank = 2, 1, 0
            self.stage_index_to_group_rank: dict[int, int] = {}
            self.submod = nn.Identity()

    mocked: Any = [Mock(), Mock()]
    upstream = their_schedules.ScheduleInterleaved1F1B(mocked, 4)
    for format in ("compute_only", "compute_comms"):
        file = str(tmp_path / format)
        upstream._dump_csv(file, format=format)  # type: ignore[arg-type]
        schedule = schedules._PipelineScheduleRuntime(stages(2), 4, loss_fn=nn.functional.mse_loss)
        schedule._load_csv(file, format=format)  # type: ignore[arg-type]
        schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
    build("interleaved-1f1b", 1, 4, 2).save(tmp_path / "ours.csv")
    schedule = schedules._PipelineScheduleRuntime(stages(2), 4, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(str(tmp_path / "ours.csv"))
    schedule.step(torch.randn(8, 4), target=torch.randn(8, 4))
    (tmp_path / "bad.csv").write_text("0F0,1F0,1B0,0Q0\n")
    with pytest.raises(NotationError, match="0Q0"):
        schedule._load_csv(str(tmp_path / "bad.csv"))
    with pytest.raises(UsageError, match="choose 'compute_only' or 'compute_comms'"):
        schedules._PipelineScheduleRuntime(stages(2), 4)._load_csv(file, format="rows")  # type: ignore[arg-type]


def test_an_order_that_cannot_run_is_refused_before_it_runs() -> None:
    schedule = schedules._PipelineScheduleRuntime(stages(2), 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(UsageError, match="has no order yet"):
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))
    rows = ["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1"]  # 0B1 is missing
    schedule.pipeline_order = {0: [schedules._Action.from_str(cell) for cell in rows]}
    with pytest.raises(ScheduleError, match="0B1"):
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4))


@pytest.mark.parametrize(
    "name", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
def test_the_order_that_is_shown_is_the_order_that_runs(name: str) -> None:
    """torch prints a 1F1B whose last rank never forwards microbatch 0."""
    per_rank = 1 if name in ("GPipe", "1F1B") else 2
    made = stages(4 * per_rank)
    for stage in made:
        stage.group_size = 4
    own: Any = made[:per_rank] if per_rank == 2 else made[0]
    schedule = ours.get_schedule_class(name)(own, 8)
    shown = schedule.pipeline_order
    assert sorted(shown) == [0, 1, 2, 3]
    forwards = [a.microbatch_index for a in shown[3] if a is not None and str(a.computation_type) == "F"]
    assert sorted(set(forwards)) == list(range(8))
    verify(schedule._schedule())
    assert schedules._validate_schedule(shown, 4, 4 * per_rank, 8)[1] == 1
    assert "Rank 3" in schedules._format_pipeline_order(shown)
    assert str(schedules._Action.from_str("(1F3;0B2)OVERLAP_F_B")) == "(1F3;0B2)OVERLAP_F_B"


def test_stages_may_be_mocked_to_look_at_orders() -> None:
    class Mock(_PipelineStageBase):
        def __init__(self, **given: Any) -> None:
            self.num_stages, self.group_size, self.group_rank = given["num_stages"], given["group_size"], 0

    for local, microbatches, ranks in [(2, 3, 4), (3, 12, 4), (2, 15, 4), (4, 10, 5)]:
        made: Any = [Mock(group_size=ranks, num_stages=local * ranks) for _ in range(local)]
        for zero_bubble in (True, False):
            schedule = ours.ScheduleFlexibleInterleaved1F1B(made, microbatches, enable_zero_bubble=zero_bubble)
            schedules._validate_schedule(schedule.pipeline_order, ranks, local * ranks, microbatches)


def test_wrapped_and_wrong_stages_are_refused() -> None:
    for index in (2, -1, "0", 0.0, True):
        with pytest.raises(UsageError, match="is out of range of 2; stages have the numbers 0 to 1"):
            ours.PipelineStage(nn.Linear(2, 2), index, 2, "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="num_stages must be a whole number"):
        ours.PipelineStage(nn.Linear(2, 2), 0, None, "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is a int; pass an"):
        ours.PipelineStage(3, 0, 2, "cpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes the PipelineStages of this rank"):
        ours.ScheduleGPipe(nn.Linear(2, 2), 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes the PipelineStages of this rank"):
        ours.ScheduleInterleaved1F1B(stages(1)[0], 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give each rank the same number"):
        ours.ScheduleInterleaved1F1B(stages(3)[:2], 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_microbatches": 2.0}, "n_microbatches must be a whole number"),
        ({"loss_fn": "mse"}, "loss_fn='mse': pass a function"),
        ({"args_chunk_spec": 5}, "args_chunk_spec=5: pass a tuple"),
        ({"args_chunk_spec": (0,)}, "0 is not a chunk spec"),
        ({"kwargs_chunk_spec": (ours.TensorChunkSpec(0),)}, "pass a dict"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_a_step(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ours.ScheduleInterleaved1F1B(stages(2), **{"n_microbatches": 2, **options})


def test_a_module_that_is_replaced_is_never_passed_over_in_silence() -> None:
    made = stages(2)
    schedule = ours.ScheduleInterleaved1F1B(made, 2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, 4)
    schedule.step(x, target=x)
    made[1].submod = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="stage 1 has another submod"):
        schedule.step(x, target=x)
    schedule.close()
    torch.testing.assert_close(schedule.step(x, target=x), made[1].submod(made[0].submod(x)).detach())


def test_a_keyword_that_no_stage_takes_is_refused() -> None:
    schedule = ours.ScheduleInterleaved1F1B(stages(2), 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'") as found:
        schedule.step(torch.randn(4, 4), target=torch.randn(4, 4), mask=3)
    assert isinstance(found.value, UsageError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks
def test_a_compiled_stage_trains_in_a_zero_bubble_schedule() -> None:
    """torch refuses it, because it cannot split the backward of a compiled module."""
    made = stages(2)
    whole = copy.deepcopy(nn.Sequential(*(stage.submod for stage in made)))
    for stage in made:
        stage.submod = torch.compile(stage.submod, backend="aot_eager")
    schedule = ours.ScheduleInterleavedZeroBubble(made, 4, loss_fn=nn.functional.mse_loss)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(2):
        schedule.step(x, target=y)
        nn.functional.mse_loss(whole(x), y).backward()
    trained = [parameter.grad for stage in made for parameter in stage.submod.parameters()]
    for found, wanted in zip(trained, whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted.grad)
