"""What a checkpoint holds of one process: a pipeline and its optimizer as named tensors, in any layout.

A parameter has one name, whatever the layout: that of its first place in the model. So a tied weight is saved once, and
every place that has it loads that one. Optimizer state goes by the name of its parameter, and so do the options of
parameter groups: who loads may have its parameters in other processes and other groups, as long as all parameters of
one group were saved under the same options.
"""

from __future__ import annotations

import datetime
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.checkpoint.generators import states_of_generators
from penstock.errors import UsageError
from penstock.runtime.messages.plain import TENSOR, encode

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

Optimizers = list[torch.optim.Optimizer]
AVERAGE = "average."  # what the keys of averaged parameters begin with
NOT_OPTIONS = ("params", "param_names")


class Saved:
    """What one process saves: tensors by key, and plain values whose tensors are among them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.plain: dict[str, Any] = {}
        self._stored: Counter[str] = Counter()

    def add(self, section: str, value: Any, place: str, owner: str = "") -> Any:
        """Encode a value as JSON; its tensors get keys that begin with `owner` and the section."""

        def store_tensor(tensor: Tensor) -> str:
            key = f"{owner}{section}.{self._stored[owner + section]}"
            self._stored[owner + section] += 1
            self.tensors[key] = tensor.detach()
            return key

        return encode(value, store_tensor, place)

    def add_model(self, pipe: Pipeline, leave_out: Callable[[str], bool] | None = None) -> None:
        """Add parameters, persistent buffers and extra state of this process's stages, without what is left out.

        Replicas have the same parameters, but buffers of their own: the model's are those of the first.
        """
        replica = pipe.deployment.replication.index
        for name, value in model_entries(pipe):
            if leave_out is not None and isinstance(value, nn.Parameter) and leave_out(name):
                continue
            if isinstance(value, Tensor):
                own = replica and not isinstance(value, (nn.Parameter, DTensor))
                key = f"replica-{replica:05d}.{name}" if own else f"{section_of(pipe, name)}.{name}"
                self.tensors[key] = value.detach()
            elif not replica:
                self.plain.setdefault("model", {})[name] = self.add(
                    f"model-extra.{name}", value, f"the extra state {name}"
                )

    def add_optimizers(self, pipe: Pipeline, optimizers: Optimizers) -> None:
        """State and options, by parameter name."""
        names = names_by_parameter(pipe)
        groups: list[dict[str, Any]] = []
        states: dict[str, dict[str, Any]] = {}
        for optimizer in optimizers:
            _check_state(optimizer)
            for number, group in enumerate(optimizer.param_groups):
                owned = [parameter for parameter in group["params"] if parameter is not pipe.state.nothing]
                members = [name_of(parameter, names, number) for parameter in owned]
                options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
                section = f"optimizer-options.{members[0] if members else len(groups)}"
                saved = self.add(section, options, f"options of parameter group {number}")
                groups.append({"number": number, "names": members, "options": saved})
                for name, parameter in zip(members, owned, strict=True):
                    states[name] = self._add_state(name, optimizer.state.get(parameter, {}))
        self.plain["optimizer"] = {"class": class_of(optimizers), "groups": groups, "state": states}

    def _add_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                whole = f"optimizer.{name}.{key}"
                if whole in self.tensors:
                    raise UsageError(f"two tensors of optimizer state would be called {whole}; rename one of them")
                self.tensors[whole] = value.detach()
                found[key] = {TENSOR: whole}
            else:
                found[key] = self.add(f"optimizer-plain.{name}.{key}", value, f"optimizer state {key!r} of {name}")
        return found


def optimizers_of(optimizer: Any) -> Optimizers:
    """Return the optimizers that were passed: a list of them, one, or none."""
    found = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise UsageError(f"optimizer={each!r}: pass a torch.optim.Optimizer, or a list of them")
    return found


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """State that belongs to no parameter would be lost without a word."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strange = [key for key in optimizer.state if id(key) not in known]
    if strange:
        what = f"a tensor of shape {tuple(strange[0].shape)}" if isinstance(strange[0], Tensor) else repr(strange[0])
        raise UsageError(
            f"{type(optimizer).__name__} keeps state under {what}, which is not one of its parameters; a checkpoint "
            f"stores state per parameter: save the rest in extra="
        )


def class_of(optimizers: Optimizers) -> str:
    return ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))


def section_of(pipe: Pipeline, name: str) -> str:
    """Return the part of a checkpoint that a name is of: the model, which other programs may want, or the loss
    function.
    """
    loss = pipe.deployment.staged.loss
    return "loss" if loss is not None and name in loss.names.values() else "model"


def model_entries(pipe: Pipeline) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all that the stages of this process have in their state, each name once."""
    others, seen = pipe.state.first_names(), set()
    for holding in pipe.deployment.holdings():
        for name, value in holding.module.state_dict(keep_vars=True).items():
            full = holding.names.get(name, name)
            if isinstance(value, nn.Parameter):
                full = others.get(full, full)
            if full not in seen:
                seen.add(full)
                yield full, value


def names_by_parameter(pipe: Pipeline) -> dict[int, str]:
    return {id(value): name for name, value in model_entries(pipe) if isinstance(value, nn.Parameter)}


def name_of(parameter: Tensor, names: Mapping[int, str], group: int) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise UsageError(
            f"parameter group {group} of the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
            f"pipeline does not own; make the optimizer from pipe.parameters()"
        )
    return name


@dataclass(frozen=True)
class Given:
    """What the user passed beside the pipeline."""

    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    data: Any = None
    extra: Any = None
    config: Any = None
    averages: Mapping[str, Tensor] | None = None
    score: float | None = None
    while_best: bool = False
    # Whether to leave out a parameter of this name, because it comes from elsewhere.
    leave_out: Callable[[str], bool] | None = None


def collect(pipe: Pipeline, given: Given, process: int) -> Saved:
    """Collect tensors (not copied yet) and plain values (copied) of this process."""
    pipe.state.check_values()
    saved = Saved()
    saved.add_model(pipe, given.leave_out)
    optimizers = optimizers_of(given.optimizer)
    if optimizers:
        saved.add_optimizers(pipe, optimizers)
    saved.tensors |= {f"{AVERAGE}{name}": value.detach() for name, value in (given.averages or {}).items()}
    owner = f"process-{process:05d}."
    saved.plain["generators"] = saved.add("generators", states_of_generators(), "the random generators", owner)
    for name in ("data", "scheduler", "scaler") if process == 0 else ("data",):
        holder = getattr(given, name)
        if holder is not None:
            check_stateful(holder, name)
            whose = owner if name == "data" else ""
            saved.plain[name] = saved.add(name, holder.state_dict(), f"{name}.state_dict()", whose)
    if process == 0:
        clock = pipe.deployment.counter
        saved.plain["clock"] = {"seed": clock.seed, "step": clock.step, "evaluations": clock.evaluations}
        saved.plain["extra"] = saved.add("extra", given.extra, "extra")
    return saved


def check_stateful(holder: Any, name: str) -> None:
    """Check that an object can give its state, and take it back."""
    if not callable(getattr(holder, "state_dict", None)) or not callable(getattr(holder, "load_state_dict", None)):
        raise UsageError(
            f"{name}={type(holder).__name__}: pass an object with state_dict() and load_state_dict(state), or use "
            f"extra= for plain values"
        )


def layout_of(pipe: Pipeline, processes: int) -> dict[str, Any]:
    """Describe how the run that saves is laid out."""
    schedule = pipe.schedule
    return {
        "processes": processes,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "placement": [schedule.placement.rank_of(stage) for stage in range(schedule.stages)],
        "schedule": schedule.name or "its own",
        "microbatches": schedule.microbatches,
        "replicas": pipe.deployment.replication.replicas,
        "replicate": pipe.composition.replicate,
        "tp": pipe.composition.axes.size("tp"),
    }


def document_of(step: int, pipe: Pipeline, given: Given, processes: int) -> dict[str, Any]:
    """Make the manifest, but for its files and number."""

    def refuse(tensor: torch.Tensor) -> str:
        raise UsageError("config= holds a tensor; put tensors into extra=")

    return {
        "step": step,
        "saved_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": encode(given.config, refuse, "config"),
        "layout": layout_of(pipe, processes),
        "versions": {
            "penstock": sys.modules["penstock"].__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "origin": pipe.deployment.staged.origin,
        "score": given.score,
        "while_best": given.while_best,
    }
