"""`penstock.compat.pipelining`: torch's names, arguments and programs; and what torch gets wrong, right."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as theirs
import torch.distributed.pipelining.schedules as their_schedules
from compat import torch_shaped as programs
from compat.small_stages import stages
from processes import on_processes
from torch import nn

import penstock.compat.pipelining as ours
from penstock.errors import UsageError

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
