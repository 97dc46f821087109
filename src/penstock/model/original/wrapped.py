"""Models and stages that the user has wrapped: what would reduce gradients at the wrong time, or hide the blocks.

`DistributedDataParallel` takes one forward and one backward at a time. `fully_shard` reduces a stage's gradients when
its backward ends, which under a split backward is before the weights' gradients are there: they would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch.nn.parallel import DataParallel, DistributedDataParallel

from penstock.errors import UsageError
from penstock.model.part import StagePart
from penstock.schedule import Op, Schedule

__all__ = ["refuse_compiled_model", "refuse_wrapped", "refuse_wrapped_model"]

DYNAMO = "torch._dynamo.eval_frame"  # slow to import, and there where a module was compiled
FSDP = "torch.distributed.fsdp"  # slow to import; who has wrapped a module with it has imported it


def refuse_wrapped_model(model: Any) -> None:
    """Raise for a model that is as a whole wrapped for data parallelism."""
    kind = type(model).__name__
    if isinstance(model, (DistributedDataParallel, DataParallel)) or kind == "FullyShardedDataParallel":
        raise UsageError(
            f"the model is wrapped in {kind}, which goes by whole batches and not by microbatches; pass the plain "
            f"model that is its .module, and let the pipeline do it: mesh=, and ParallelOptions(replicate='fsdp') to "
            f"shard"
        )


def refuse_compiled_model(model: Any) -> None:
    """Raise for a model that torch.compile has made one block of."""
    if isinstance(model, getattr(sys.modules.get(DYNAMO), "OptimizedModule", ())):
        raise UsageError(
            "the model is compiled as a whole by torch.compile, so that there is nowhere to cut it; pass the model "
            "that was compiled, and compile its blocks one by one: block.compile()"
        )


def refuse_wrapped(parts: Sequence[StagePart], schedule: Schedule) -> None:
    """Raise for the first stage with a wrapper that this schedule would get wrong."""
    splits = any(action.op in (Op.I, Op.W) for _, _, action in schedule.parts())
    sharded: Any = getattr(sys.modules.get(FSDP), "FSDPModule", ())
    for part in parts:
        for module in part.module.modules():
            if isinstance(module, DistributedDataParallel):
                how, why = "DistributedDataParallel", "it would reduce gradients at every microbatch"
            elif splits and isinstance(module, sharded):
                how, why = (
                    "fully_shard",
                    f"{schedule.name or 'its schedule'} computes weights' gradients after it reduces",
                )
            else:
                continue
            raise UsageError(
                f"stage {part.index} is wrapped in {how}, but {why}; pass the plain module, and let the pipeline do "
                f"it: mesh=, and ParallelOptions(replicate='fsdp') to shard"
            )
