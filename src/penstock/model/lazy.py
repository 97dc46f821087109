"""Models larger than one rank's memory: built without values, filled stage by stage.

`with penstock.lazy():` around a model's construction leaves every parameter on the meta device
the moment it is registered, so at most one of them is in memory at a time. Buffers keep
their values, because what is not saved with a model (rotary tables, masks) could not be loaded
again. The pipeline then cuts the model from its shapes and each rank materialises what it
owns, and nothing else: from a state (`load_state_dict`) or by a function of the name (`init=`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy as uninitialized

from penstock.errors import ModelError
from penstock.model.replaced import mark_replaced

__all__ = ["check_values", "is_lazy", "lazy", "materialise", "stands_for"]

Init = Callable[[str, Tensor], Any]


@contextmanager
def lazy() -> Iterator[None]:
    """Build models inside without memory for their parameters."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def is_lazy(module: nn.Module) -> bool:
    """Whether any parameter has no value yet."""
    return any(parameter.device.type == "meta" for parameter in module.parameters())


def check_values(model: nn.Module) -> None:
    """Refuse parameters without shapes, and buffers without values, which the model's code reads when it is cut."""
    unknown = [name for name, parameter in model.named_parameters() if uninitialized(parameter)]
    if unknown:
        raise ModelError(
            f"{len(unknown)} parameters of {type(model).__name__} have no shape yet ({', '.join(unknown[:4])}"
            f"{', ...' if len(unknown) > 4 else ''}), as in nn.LazyLinear; run the model once before it is cut"
        )
    empty = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if empty:
        raise ModelError(
            f"{len(empty)} buffers of {type(model).__name__} have no values ({', '.join(empty[:4])}"
            f"{', ...' if len(empty) > 4 else ''}), as under torch.device('meta'); build the model in "
            f"`with penstock.lazy():`, which leaves only parameters without"
        )


def stands_for(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter as it was built: the same one for all stages that share it, wherever it has been given values."""
    origin: nn.Parameter = getattr(parameter, "_stands_for", parameter)
    return origin


def materialise(
    module: nn.Module, names: dict[str, str], device: torch.device, init: Init | None, made: dict[int, nn.Parameter]
) -> list[str]:
    """Give the parameters that a stage owns memory, and values by name; returns the names left without.

    `made` maps what was replaced so far, so that tied parameters stay one. Values that nobody
    gave are NaN: a step on them can't pass for training.
    """
    missing = []
    for prefix, holder in module.named_modules():
        for name, parameter in list(holder._parameters.items()):
            if parameter is None or parameter.device.type != "meta":
                continue
            full = names[f"{prefix}.{name}" if prefix else name]
            known = made.get(id(parameter))
            if known is None:
                values = torch.full_like(parameter, float("nan"), device=device)
                known = nn.Parameter(values, requires_grad=parameter.requires_grad)
                if init is None:
                    missing.append(full)
                else:
                    with torch.no_grad():
                        result = init(full, known)
                        if isinstance(result, Tensor) and result is not known:
                            known.copy_(result)
                known.__dict__["_stands_for"] = stands_for(parameter)
                made[id(parameter)] = known
                mark_replaced([parameter], ())
            holder._parameters[name] = known
    return missing
