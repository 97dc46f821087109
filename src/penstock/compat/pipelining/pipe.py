"""torch's front end for whole models: a model and where to split it become a `Pipe`, and that becomes stages.

The places are names of modules, or calls of `pipe_split()` in a forward. One run of the model on the example shows
which module or parameter is used next after each place; the cut is made before that, by Penstock's own ways to cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compat.pipelining.stage import PipeInfo, _PipelineStageBase, build_stage
from penstock.errors import ModelError, UsageError
from penstock.model.cut import cut_model
from penstock.model.part import hang
from penstock.model.replay.recording.undo import undone
from penstock.model.staged_model import StagedModel

__all__ = ["Pipe", "PipeInfo", "SplitPoint", "build_stage", "pipe_split", "pipeline"]

_NOTE: ContextVar[Callable[[], None] | None] = ContextVar("penstock_pipe_split", default=None)


class SplitPoint(Enum):
    """Where to split at a named module: before its forward (`BEGINNING`) or after it (`END`)."""

    BEGINNING = 1
    END = 2


def pipe_split() -> None:
    """Call it in a forward to end a stage there. Does nothing when the model runs by itself."""
    note = _NOTE.get()
    if note is not None:
        note()


class StageModule(nn.Module):
    """What a stage owns, under the names that it has in the model. A schedule runs it."""

    def __init__(self, index: int, own: nn.Module) -> None:
        super().__init__()
        self.__dict__["_own"] = own
        self.__dict__["_index"] = index

    def train(self, mode: bool = True) -> StageModule:
        """Set the mode of the modules that run."""
        self.__dict__["_own"].train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            f"stage {self.__dict__['_index']} of a Pipe runs in a schedule; call the Pipe for the whole model"
        )


class Pipe(nn.Module):
    """A model and where it is cut, as `pipeline` returns it.

    Args:
        model: The model.
        example: Inputs of the model, as a tuple or a dict of keyword arguments.
        split_at: Names of the modules that begin stages 1, 2, ...
    """

    def __init__(self, model: nn.Module, example: tuple[Any, ...] | dict[str, Any], split_at: list[str]) -> None:
        super().__init__()
        self.model = model
        self.cut: dict[str, Any] = {"example": example, "split_at": split_at}
        if not split_at:
            self.cut = {"example": example, "stages": 1}
        self.split: StagedModel = cut_model(model, self.cut.get("stages"), example=example, split_at=split_at)
        self.num_stages = self.split.stages
        self.has_loss_and_backward = False
        self._modules_of: dict[int, nn.Module] = {}

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: Mapping[str, Any] | None = None,
        split_policy: Any = None,
    ) -> Pipe:
        """Cut a model where its forward calls `pipe_split()`.

        Args:
            mod: The model.
            example_args: Positional inputs.
            example_kwargs: Keyword inputs.
            split_policy: Refused if given: it rewrites graphs of torch, of which there are none here.
        """
        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the whole model here; the output is a tuple, as in torch.

        Args:
            *args: Positional inputs.
            **kwargs: Keyword inputs.
        """
        output = self.model(*args, **kwargs)
        return output if isinstance(output, tuple) else (output,)

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """Return the module of a stage, with parameters under the model's own names.

        Args:
            stage_idx: The stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise UsageError(f"Invalid stage index {stage_idx}! There are {self.num_stages} stages")
        if stage_idx not in self._modules_of:
            part = self.split.parts[stage_idx]
            self._modules_of[stage_idx] = StageModule(stage_idx, part.module)
            for name, tensor in part.module.state_dict(keep_vars=True).items():
                hang(self._modules_of[stage_idx], part.names.get(name, name), tensor)
        return self._modules_of[stage_idx]

    def info(self) -> PipeInfo:
        """Return what `build_stage` needs to know."""
        return PipeInfo(self.num_stages, self.has_loss_and_backward, self)

    def build_stage(
        self, stage_index: int, device: torch.device | str | None = None, group: dist.ProcessGroup | None = None
    ) -> _PipelineStageBase:
        """Build one stage for a schedule.

        Args:
            stage_index: The stage.
            device: The device of the stage.
            group: The process group of the pipeline's ranks.
        """
        return build_stage(self.get_stage_module(stage_index), stage_index, self.info(), device, group)

    def print_readable(self) -> None:
        """Print how the model was cut, and what each stage owns."""
        print(self.split.how)
        for part in self.split.parts:
            print(f"stage {part.index}: {', '.join(part.names.values())}")


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Any = None,
) -> Pipe:
    """Cut a model at named modules, or where its forward calls `pipe_split()`. The model itself is not changed.

    Args:
        module: The model.
        mb_args: Positional inputs of one microbatch.
        mb_kwargs: Keyword inputs of one microbatch.
        split_spec: Where to split: names of modules to a `SplitPoint` each.
        split_policy: Refused if given: it rewrites graphs of torch, of which there are none here.
    """
    if split_spec is not None and split_policy is not None:
        raise UsageError("pass split_spec or split_policy, not both")
    if split_policy is not None:
        raise UsageError("a split_policy rewrites torch's graphs, of which there are none here; pass split_spec")
    if mb_args and mb_kwargs:
        bound = inspect.signature(module.forward).bind(*mb_args, **mb_kwargs)
        example: tuple[Any, ...] | dict[str, Any] = dict(bound.arguments)
        if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in bound.signature.parameters.values()):
            raise UsageError("a forward of *args or **kwargs takes mb_args or mb_kwargs here, not both")
    else:
        example = dict(mb_kwargs) if mb_kwargs else tuple(mb_args)
    return Pipe(module, example, _cut_names(module, example, dict(split_spec or {})))


Events = list[tuple[str, str]]  # Events of one run: "enter" and a module, "use" and a parameter, or SPLIT.
SPLIT = ("split", "")


class _TorchSplits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Logs calls of torch's own pipe_split, which is an operation."""

    def __init__(self, log: Events) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "pippy::_pipe_split":
            self._log.append(SPLIT)
        return func(*args, **(kwargs or {}))


class _Uses(TorchFunctionMode):
    """Sees parameters that the forward uses, in a module or beside it."""

    def __init__(self, module: nn.Module, log: Events) -> None:
        super().__init__()
        self._log = log
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if id(leaf) in self._names:
                self._log.append(("use", self._names[id(leaf)]))
        return func(*args, **(kwargs or {}))


def _cut_names(module: nn.Module, example: Any, spec: dict[str, SplitPoint]) -> list[str]:
    """Return the names of the modules, or parameters, before whose use the cuts are, in the order of the forward."""
    for name, point in spec.items():
        if name not in dict(module.named_modules()):
            raise UsageError(f"split_spec: {type(module).__name__} has no module {name!r}")
        if getattr(point, "name", None) not in SplitPoint.__members__:
            raise UsageError(f"split_spec[{name!r}] is {point!r}; pass SplitPoint.BEGINNING or SplitPoint.END")
    log: Events = []
    with _logged(module, spec, log):
        if isinstance(example, dict):
            module(**example)
        else:
            module(*example)
    owners = {name for name, each in module.named_modules() if next(each.parameters(), None) is not None}
    found: list[str] = []
    for place, event in enumerate(log):
        if event == SPLIT:
            begins = _begins(log, place, owners)
            if begins is None:
                raise ModelError(
                    f"nothing with parameters is used between split {len(found) + 1} and the next, and nothing new "
                    f"after that; split elsewhere, or make stages by hand"
                )
            found.append(begins)
    if len(found) < len(spec):
        raise ModelError(f"only {len(found)} of the {len(spec)} modules in split_spec are called in the forward")
    return list(dict.fromkeys(found))


def _begins(events: Events, place: int, owners: set[str]) -> str | None:
    """Return what the stage after a split begins with: the first module or parameter that is used only from there on.

    Where a stage has only what was used before, it is the first of that, and which time it is.
    """
    before = {name for _, name in events[:place]}
    after = events[place + 1 :]
    end = after.index(SPLIT) if SPLIT in after else len(after)
    used = [[each for each in part if each[0] == "use" or each[1] in owners] for part in (after[:end], after[end:])]
    for _, name in used[0]:
        if name not in before:
            return name
    if used[0]:
        kind, name = used[0][0]
        return f"{name}#{1 + events[:place].count((kind, name))}"
    return next((name for _, name in used[1] if name not in before), None)


@contextmanager
def _logged(module: nn.Module, spec: Mapping[str, SplitPoint], log: Events) -> Iterator[None]:
    """Log the calls inside; everything that the run changes is put back."""

    def note(event: tuple[str, str]) -> Callable[..., None]:
        return lambda *_: log.append(event)

    with ExitStack() as stack:
        for name, each in list(module.named_modules())[1:]:
            point = spec[name].name if name in spec else ""
            hooks = [each.register_forward_pre_hook(note(SPLIT))] if point == "BEGINNING" else []
            hooks.append(each.register_forward_pre_hook(note(("enter", name))))
            if point == "END":
                hooks.append(each.register_forward_hook(note(SPLIT)))
            for hook in hooks:
                stack.callback(hook.remove)
        stack.callback(_NOTE.reset, _NOTE.set(note(SPLIT)))
        with undone(module), torch.no_grad(), _TorchSplits(log), _Uses(module, log):
            yield
