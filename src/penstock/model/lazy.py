"""Models larger than one rank's memory: built without values, filled stage by stage.

`with penstock.lazy():` around a model's construction leaves every parameter on the meta device the moment it is
registered, so at most one of them is in memory at a time. Buffers keep their values, because what is not saved with a
model (rotary tables, masks) could not be loaded again. The pipeline then cuts the model from its shapes and each rank
materialises what it owns, and nothing else. What other ranks own is away (see `placeholders`).

An optimizer that was made before others took the place of a parameter (values, a shard, a part) still has the old ones.
They never get a gradient again, and optimizers pass over parameters without one: such a loop trains nothing, or a part
of the model. So the old ones are marked, and an optimizer that steps on one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy as uninitialized
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from penstock.errors import ModelError, UsageError
from penstock.model.original.placeholders import Home, home_of, let_go, one_element

Init = Callable[[str, Tensor], Any]
OwnedParameter = tuple[str, torch.device]  # a parameter's name in the whole model, and where its memory shall be


@contextmanager
def lazy() -> Iterator[None]:
    """Build models inside the `with` block without memory for their parameters.

    A `Pipeline` then gives values only to the stages that each process owns, through `init=` or `load_state_dict`.
    """
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
    """Return whether any parameter has no value yet."""
    return any(parameter.device.type == "meta" for parameter in module.parameters())


def check_values(model: nn.Module) -> None:
    """Refuse parameters without shapes, and tensors without values that are needed to cut the model, or to train it."""
    gone = next((home_of(each) for each in (*model.parameters(), *model.buffers()) if home_of(each) is not None), None)
    if gone is not None:
        raise ModelError(
            f"another Pipeline trains {type(model).__name__}, and {gone.name}, for example, is on {gone}: this "
            f"process has "
            f"no value of it, or an old one. Make all Pipelines of a model before the first step, with the same cut "
            f"and placement; or call fill_model() of the other Pipeline, on every rank, before this one is made"
        )
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


def materialise(
    roots: Iterable[nn.Module],
    mine: Mapping[int, OwnedParameter],
    others: Mapping[int, Home],
    device: torch.device,
    init: Init | None,
) -> list[str]:
    """Give the parameters that stages of this process own memory, and values by name; returns the names left without.

    `mine` and `others` are the parameters of this process's stages and of other ranks', by their ids. Wherever one
    stands in `roots`, the same new one stands afterwards, so that tied parameters stay one; `others` are away, on
    `device`. Values that nobody gave are NaN: a step on them can't pass for training.
    """
    missing: list[str] = []
    made: dict[int, nn.Parameter] = {}

    def new(parameter: nn.Parameter) -> nn.Parameter:
        own = mine.get(id(parameter))
        trained = parameter.requires_grad
        if own is None:
            away = nn.Parameter(one_element(parameter, device), requires_grad=trained)
            let_go(away, others[id(parameter)], parameter.stride())
            return away
        name, place = own
        known = nn.Parameter(torch.full_like(parameter, float("nan"), device=place), requires_grad=trained)
        if init is None:
            missing.append(name)
        else:
            with torch.no_grad():
                result = init(name, known)
                if isinstance(result, Tensor) and result is not known:
                    known.copy_(result)
        return known

    replaced: list[nn.Parameter] = []
    for holder in (holder for root in roots for holder in root.modules()):
        for name, parameter in list(holder._parameters.items()):
            if parameter is not None and parameter.is_meta and (id(parameter) in mine or id(parameter) in others):
                if id(parameter) not in made:
                    made[id(parameter)] = new(parameter)
                    replaced.append(parameter)  # The reference keeps its id its own.
                holder._parameters[name] = made[id(parameter)]
    mark_replaced(replaced)
    return missing


MARK = "_penstock_replaced"
_watching: list[Any] = []  # torch's handle, once there is something to look for


def mark_replaced(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.__dict__[MARK] = True
        if not _watching:
            _watching.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if MARK in parameter.__dict__:
                raise UsageError(
                    f"this {type(optimizer).__name__} was made before the Pipeline, which has replaced the "
                    f"parameters that it holds, so it would train nothing; make it afterwards, from pipe.parameters()"
                )
