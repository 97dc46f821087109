"""What a `GPipe` is given, looked at before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as pytree

from penstock.devices import accelerator
from penstock.errors import ModelError, UsageError
from penstock.model.original.wrappers import refuse_compiled_model
from penstock.pipeline import arguments
from penstock.pipeline.devices import check_devices
from penstock.rules import ArgumentRule, check_rules, choice, is_count
from penstock.runtime.batch.batch_options import BatchOptions

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
