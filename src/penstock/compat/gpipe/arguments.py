"""What a `GPipe` is given, looked at before anything is built, and the cuts of its model that follow from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as pytree

from penstock.devices import accelerator
from penstock.errors import ModelError, UsageError
from penstock.model.balance.request import Balancing
from penstock.model.by_position import more_than_its_layers
from penstock.model.cut import Example, cut_model
from penstock.model.cut_options import CutOptions
from penstock.model.original.wrappers import refuse_compiled_model
from penstock.model.staged_model import StagedModel
from penstock.pipeline import arguments
from penstock.pipeline.devices import check_devices
from penstock.rules import ArgumentRule, check_rules, choice, is_count
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.schedule import build

Balance = Sequence[int] | int | str | Mapping[str, float] | None
MOST_BY_ITSELF = 8  # stages on a CPU where nothing says how many


@dataclass(frozen=True)
class CutRequest:
    """`stages` is None where neither it nor `balance`, `split_at` or `devices` says how many there shall be."""

    stages: int | None
    how: Any  # counts, "parameters", "time", "memory" or weights by name; None where `split_at` says it
    split_at: tuple[str, ...]

    @classmethod
    def of(
        cls, stages: int | None, balance: Balance, split_at: Sequence[str] | None, devices: Sequence[Any] | None
    ) -> Self:
        """Make a request from what a GPipe is given."""
        counts = list(balance) if isinstance(balance, Sequence) and not isinstance(balance, str) else None
        how: Any = balance if counts is None else counts
        if balance is None or isinstance(balance, int):
            how = None if split_at else "parameters"
        Balancing(how)  # It refuses what it does not know.
        counts_by_name = {
            "stages": stages,
            "balance": balance if isinstance(balance, int) else None if counts is None else len(counts),
            "split_at": len(split_at) + 1 if split_at else None,
            "devices": None if devices is None else len(devices),
        }
        given = {name: value for name, value in counts_by_name.items() if value is not None}
        if len(set(given.values())) > 1:
            words = ", ".join(f"{name}= says {value}" for name, value in given.items())
            raise UsageError(f"how many stages? {words}; leave all but one out, or make them agree")
        return cls(next(iter(given.values()), None), how, tuple(split_at or ()))

    def by_position(self, model: nn.Module) -> bool:
        """Return whether the cuts are between layers of an `nn.Sequential`."""
        if not isinstance(model, nn.Sequential) or more_than_its_layers(model):
            return False
        return set(self.split_at) <= set(model._modules)

    def needs_batch(self, model: nn.Module) -> bool:
        """Return whether a batch has to be looked at."""
        return not self.by_position(model) or not (isinstance(self.how, list) or self.how in (None, "parameters"))

    def with_counts(self, counts: list[int] | None) -> Self:
        """Return the same request with the layers per stage that were found, if any were."""
        return replace(self, how=counts, split_at=()) if counts else self

    def cut(self, model: nn.Module, chunks: int, example: Example | None) -> StagedModel:
        """Cut the model into stages."""
        by_position = self.by_position(model)
        stages = self.stages or _stages_by_itself(model)
        balancing = Balancing(self.how, schedule_for=lambda count: build("gpipe", count, chunks))
        fewest = stages if self.stages or by_position else 1
        # Nothing says how many: take as many as there can be.
        for count in range(stages, fewest, -1):
            with suppress(ModelError):
                return cut_model(model, count, balance=balancing, example=example)
        return cut_model(model, fewest, balance=balancing, example=example, split_at=self.split_at)


def cut_another_path(model: nn.Module, split: StagedModel, example: Example) -> StagedModel:
    """Cut the stages for a batch that takes another path through a model which was cut as `split`.

    Layers stay on the stages that they have, as far as the path goes: `layers[:depth]` may end before the last stage.
    """
    names = [piece.name for piece in split.weights]
    starts = [f"{names[cut]}#{names[: cut + 1].count(names[cut])}" for cut in split.cuts]
    options = CutOptions(method="replay")
    for count in range(len(starts), 0, -1):
        with suppress(ModelError):
            return cut_model(model, None, example=example, split_at=starts[:count], options=options)
    return cut_model(model, 1, example=example, options=options)


def _stages_by_itself(model: nn.Module) -> int:
    """Return how many stages to make where nothing says so: one for each GPU, or for each core there is."""
    many = torch.accelerator.device_count() or min(len(os.sched_getaffinity(0)), MOST_BY_ITSELF)
    return max(1, min(many, len(model) if isinstance(model, nn.Sequential) else many))


CALL_RULES = {
    "chunks": ArgumentRule(
        lambda value: is_count(value) and value >= 1,
        "pass the number of microbatches, a whole number of at least 1",
        or_none=False,
    ),
    "checkpoint": choice("always", "except_last", "never"),
}
RULES = CALL_RULES | {name: arguments.RULES[name] for name in ("stages", "split_at", "timeout", "batch_options")}


def check_gpipe(kind: type[nn.Module], model: Any, given: Mapping[str, Any]) -> None:
    """Raise for the first of the arguments, by name, that cannot work; `kind` is the class that wraps."""
    if not isinstance(model, nn.Module):
        wrap = "; pass nn.Sequential(*layers)" if isinstance(model, Sequence) else ""
        raise ModelError(f"GPipe wraps an nn.Module, and was given a {type(model).__name__}{wrap}")
    if isinstance(model, (nn.Sequential, nn.ModuleList)) and not len(model):
        raise ModelError(f"the model is an empty {type(model).__name__}; there is nothing to cut into stages")
    refuse_compiled_model(model)
    if isinstance(model, kind):
        raise ModelError("the model is a GPipe already; wrap its .module, or put it into a larger model")
    lazy = (UninitializedParameter, UninitializedBuffer)
    if any(isinstance(each, lazy) for each in (*model.parameters(), *model.buffers())):
        raise ModelError("the model has lazy layers that do not know their sizes yet; call it once before it is cut")
    if any(each.is_meta for each in model.parameters()):
        raise ModelError(
            "the model has parameters without values, on the meta device; build it outside of penstock.lazy(), which "
            "is for a Pipeline only"
        )
    if isinstance(model, nn.ModuleList):
        raise ModelError("an nn.ModuleList has no forward; pass nn.Sequential(*layers)")
    check_rules(given, RULES)
    _check_balance(given["balance"], given["split_at"])
    _check_batch_options(given["batch_options"])


def _check_balance(balance: Any, split_at: Sequence[str] | None) -> None:
    if isinstance(balance, bool) or (isinstance(balance, int) and balance < 1):
        raise UsageError(f"balance={balance!r}: pass the number of stages, or the number of layers in each")
    if balance is not None and not isinstance(balance, (int, str, Sequence, Mapping)):
        raise UsageError(
            f"balance={balance!r}: pass the number of layers in each stage, a number of stages, 'time', 'parameters' "
            f"or 'memory', or {{name: weight}}"
        )
    if split_at and balance is not None and not isinstance(balance, int):
        raise UsageError("balance= and split_at= both say where to cut; leave one of them out")


def _check_batch_options(options: BatchOptions) -> None:
    """Check the options of a batch: a GPipe takes it whole in one process, and cuts it into its number of chunks."""
    if options.split is not None or options.inputs != "every":
        name = "inputs" if options.split is None else "split"
        raise UsageError(
            f"BatchOptions({name}=) is for a Pipeline; a GPipe takes dims, batch_norm and batch_norm_group"
        )


def as_devices(devices: Any) -> list[torch.device] | None:
    """Return a device for each stage, from names, devices or numbers of GPUs, such as `range(4)`."""
    if devices is None:
        return None
    try:
        if isinstance(devices, str):
            raise TypeError
        found = [
            torch.device(accelerator() or "cuda", each) if is_count(each) else torch.device(each) for each in devices
        ]
    except (RuntimeError, TypeError):
        raise UsageError(
            f"devices={devices!r}: pass one device for each stage, such as ['cuda:0', 'cuda:1'], or range(2)"
        ) from None
    check_devices(found)
    return found


def check_tangents(given: Any, parameters: Iterable[Tensor]) -> None:
    """Refuse a call in forward mode: stages are other threads, in which tangents would be lost without a word."""
    if forward_ad._current_level < 0:
        return
    for tensor in (*pytree.tree_leaves(given), *parameters):
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise UsageError("GPipe has no forward-mode gradients; use backward(), or call its .module")
