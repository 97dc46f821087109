"""Models and stages that the user has wrapped for data parallelism or compiled: what hides the blocks is refused.

A single stage may be wrapped: `penstock.parallel` then says when its gradients are reduced.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from penstock.errors import UsageError

DDP, FSDP = "DistributedDataParallel", "fully_shard"  # ways in which a stage may be wrapped

DYNAMO = "torch._dynamo.eval_frame"  # slow to import, and there where a module was compiled
FSDP_MODULE = "torch.distributed.fsdp"  # slow to import; who has wrapped a module with it has imported it


def refuse_wrapped_model(model: Any) -> None:
    """Raise for a model that is as a whole wrapped for data parallelism."""
    kind = type(model).__name__
    if isinstance(model, (DistributedDataParallel, DataParallel)) or kind == "FullyShardedDataParallel":
        raise UsageError(
            f"the model is wrapped in {kind}, which works on whole batches, not on microbatches; pass the plain "
            f"model that is its .module, and let the pipeline do it: mesh=, and ParallelOptions(replicate='fsdp') to "
            f"shard"
        )


def refuse_compiled_model(model: Any) -> None:
    """Raise for a model that torch.compile has made one block of."""
    if isinstance(model, getattr(sys.modules.get(DYNAMO), "OptimizedModule", ())):
        raise UsageError(
            "the model is compiled as a whole by torch.compile, so there is no place to cut it; pass the model "
            "that was compiled, and compile its blocks one by one: block.compile()"
        )


def wrappings(module: nn.Module) -> frozenset[str]:
    """Return how a stage is wrapped for data parallelism, as a whole or in parts of it; empty where it is not."""
    # A module that stands for one elsewhere has this.
    declared: frozenset[str] | None = getattr(module, "wrapped_in", None)
    if declared is not None:
        return declared
    sharded: Any = getattr(sys.modules.get(FSDP_MODULE), "FSDPModule", ())
    kinds = {FSDP: sharded, DDP: DistributedDataParallel}
    return frozenset(name for name, kind in kinds.items() if any(isinstance(each, kind) for each in module.modules()))
