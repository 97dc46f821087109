"""How a pipeline is spread over replicas and tensors, beside its stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.errors import UsageError
from penstock.rules import ArgumentRule, check_rules, choice, is_count

RULES = {
    "replicate": choice(None, "ddp", "fsdp"),
    "window": ArgumentRule(
        lambda value: is_count(value) and value >= 1,
        "pass how many stages per rank are complete at a time, at least 1",
    ),
    "shard_precision": ArgumentRule(
        lambda value: type(value).__name__ == "MixedPrecisionPolicy",  # importing it takes a second
        "pass a torch.distributed.fsdp.MixedPrecisionPolicy",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How replicas and tensors are spread over `mesh=`, such as `ParallelOptions(replicate="fsdp")`.

    Args:
        replicate: `"ddp"`: each replica has all parameters of its stages (the default for a mesh with an axis `dp`).
            `"fsdp"`: parameters are sharded over the replicas.
        window: With `"fsdp"`, how many stages per rank are complete at a time.
        shard_precision: With `"fsdp"`, a `MixedPrecisionPolicy` for casts before gathering.
        tensor_plan: How layers are divided over the axis `tp`: a `TensorPlan`, the name of a built-in one such as
            `"llama"`, or a dict of patterns of module names to styles.
    """

    replicate: str | None = None
    window: int | None = None
    shard_precision: Any = None
    tensor_plan: Any = None

    def __post_init__(self) -> None:
        check_rules(vars(self), RULES, "ParallelOptions")
        for name in ("window", "shard_precision"):
            if getattr(self, name) is not None and self.replicate != "fsdp":
                raise UsageError(
                    f"ParallelOptions({name}=) is about sharded parameters; pass replicate='fsdp' with it, or leave it "
                    f"out"
                )
