"""A step as a transaction: where it fails, the model is as it was before, and the same step can be run again.

Before a step, a look is taken at all that its computes may change: buffers (`tensor_snapshots`), plain attributes
(`attribute_snapshots`), modes, the generators of Python and numpy, and which parameters have gradients. (torch's own
generator is put back after every step, see `randomness`; the numbers of the pipeline's own streams follow from the
count of steps, which only a step that ends well moves.) After a failure all of it is put back: gradients that the step
has made are dropped. Those that were there before are added to in place, and are copied beforehand: a sum that is kept
apart and added at the end would be another sum. Replicas set them aside, so that nothing is copied.

Hooks that want complete gradients (`register_post_accumulate_grad_hook`: mostly an optimizer in the backward) are held
during a step, and run once for each parameter when the step has ended well. Before that a gradient is not complete:
more microbatches, other ranks' parts of tied weights, and replicas are still to be added. And what such a hook does,
such as an update, could not be undone if the step fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import REBUILD, ModelError, PeerFailure, RunError, UsageError
from penstock.model.original.placeholders import is_away
from penstock.model.random_states import host_states, put_back_host
from penstock.runtime.state.attribute_snapshots import ModuleSnapshot, TensorsAndAttributes
from penstock.runtime.state.ownership import version_of
from penstock.runtime.state.randomness import StepCounter
from penstock.runtime.state.tensor_snapshots import LARGE_BYTES, Contents

Hooks = dict[int, Callable[[Tensor], object]]  # of one parameter, by number


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that a function is, is a method of, or names in its code."""
    while isinstance(function, partial):
        function = function.func
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module) or not isinstance(function, FunctionType):
        return [owner] if isinstance(owner, nn.Module) else []
    inside = inspect.getclosurevars(function)
    return [each for each in (*inside.nonlocals.values(), *inside.globals.values()) if isinstance(each, nn.Module)]


class HasModule(Protocol):
    """A stage, as far as its state goes."""

    @property
    def module(self) -> nn.Module: ...


class Transaction:
    """Restores the model's state on this process's ranks when a step fails.

    `stages` are those of each rank, `last` is the rank that computes the loss, if it is here, and `late` are the ranks
    that have not left a step that failed. `is_lost` says whether a rank of another process is lost for good.
    """

    def __init__(
        self,
        stages: Mapping[int, Mapping[int, HasModule]],
        last: int | None,
        counter: StepCounter,
        late: Callable[[], Iterable[int]],
        is_lost: Callable[[], bool],
    ) -> None:
        self._counter = counter
        self._late = late
        self._is_lost = is_lost  # whether a peer is, so that no step can follow
        self._stages, self._last = stages, last
        self._ranks = {rank: _RankState() for rank in stages}
        self._inside = False
        self._undo_last: Callable[[], None] | None = None
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}  # of parameters, when a step failed: by rank

    @contextmanager
    def __call__(
        self, *, training: bool, adds: bool = True, runs_hooks: bool = True, loss_fn: Any = None
    ) -> Iterator[Transaction]:
        """Surround a step, or an evaluation.

        `adds`: a step adds to the gradients of earlier ones in place. `runs_hooks`: it has backwards, and hooks of
        parameters that want complete gradients.
        """
        if self._inside:  # before anything is looked at: a step that runs is in between
            raise UsageError("this pipeline is in a step already; use it from one thread at a time")
        self._inside = True
        try:
            for number, rank in self._ranks.items():
                modules = [stage.module for stage in self._stages[number].values()]
                if number == self._last and loss_fn is not None:
                    modules += self._loss_modules(loss_fn)
                rank.take(modules, gradients=training, copied=training and adds)
                if training and runs_hooks:
                    rank.parameters.hold_hooks()
            step, evaluations, others = self._counter.step, self._counter.evaluations, host_states()
            try:
                yield self
            except BaseException as error:
                self._undo(others, (step, evaluations))
                self._explain(error, training)
                raise
            complete = [hook for rank in self._ranks.values() for hook in rank.parameters.release_hooks()]
            for rank in self._ranks.values():
                rank.left_alone()
            self._undo_last = partial(self._undo, others, (step, evaluations))
        finally:
            self._inside = False
        for run in complete:
            run()

    def has_hooks(self) -> bool:
        """Return whether hooks want complete gradients of parameters that took part in the last step."""
        return any(rank.parameters.have_hooks() for rank in self._ranks.values())

    def take_back(self) -> bool:
        """Undo the last step all the same, though it ended well, but for gradients; returns whether all is as before.

        There must have been no other step of this transaction since.
        """
        assert self._undo_last is not None
        self._undo_last()
        return not any(rank.lost() for rank in self._ranks.values())

    def _loss_modules(self, loss_fn: Any) -> list[nn.Module]:
        """The modules of a loss function, unless it looks at the model itself."""
        found = modules_of(loss_fn)
        if not found:
            return []
        own = {
            id(each) for stages in self._stages.values() for stage in stages.values() for each in stage.module.modules()
        }
        return [module for module in found if own.isdisjoint(map(id, module.modules()))]

    def put_back_buffers(self) -> None:
        """After an evaluation: it may count in attributes, as a plain model does, but leaves buffers as they were."""
        for rank in self._ranks.values():
            rank.put_back_buffers()
        lost = [name for rank in self._ranks.values() for name in rank.lost()]
        if lost:
            raise RunError(
                f"the evaluation wrote to {', '.join(lost)}, which earlier ones did not, so that no copy was kept to "
                f"restore: the model is not what it was; write to buffers in training mode only"
            )

    def _undo(self, others: tuple[Any, Any], counts: tuple[int, int]) -> None:
        """To its end, also if Ctrl-C comes once more meanwhile; that is then raised."""
        self._counter.step, self._counter.evaluations = counts
        again: KeyboardInterrupt | None = None
        while True:
            try:
                put_back_host(others)
                self._versions = {number: self._ranks[number].parameters.versions() for number in self._late()}
                for number, rank in self._ranks.items():
                    rank.put_back()
                    if number not in self._versions:
                        rank.parameters.release_hooks()
                break
            except KeyboardInterrupt as error:
                again = error
        if again is not None:
            raise again

    def undo_late(self) -> None:
        """The ranks that were late have left the step that failed by now; what they have changed is put back."""
        late, self._versions = self._versions, {}
        for number, versions in late.items():
            if any(version_of(parameter) != version for parameter, version in versions):
                raise RunError(
                    f"rank {number} has only now left a step that failed earlier, and parameters of its stages were "
                    f"changed in between, so its buffers and counters may be yours or left over from that step. Load "
                    f"the state again with pipe.load_state_dict(), which waits for such a rank"
                )
            self._ranks[number].put_back()
            self._ranks[number].parameters.release_hooks()

    def _explain(self, error: BaseException, training: bool) -> None:
        """Add a note to the error about what became of the model."""
        ranks = self._ranks.values()
        lost = [name for rank in ranks for name in rank.lost()]
        written = {id(parameter) for rank in ranks for parameter in rank.parameters.written()}
        if written:
            error.add_note(
                f"the model's own code has written to {len(written)} parameters in this step (in a forward, or in a "
                f"hook that updates weights), which is not undone: load them again, or change parameters between "
                f"steps only"
            )
        elif training and not lost and not isinstance(error, (ModelError, UsageError)):  # these mostly come before
            causes = (each.cause for each in (error, error.__cause__) if isinstance(each, PeerFailure))
            is_lost = self._is_lost() or any(REBUILD in cause for cause in causes)
            error.add_note(
                "this step is undone: gradients, buffers, counters and random numbers are as before it"
                + ("" if is_lost else ", and it can be run again")
            )
        if lost:
            error.add_note(
                f"the step has written to {', '.join(lost)}, which no step had done before, so that no copy was kept "
                f"to restore (of buffers above {LARGE_BYTES // 2**20} MiB); load the state again"
            )
        if self._versions:
            error.add_note(
                f"{_listed(self._versions)} still in code of the model, which cannot be stopped; what it changes until "
                f"it ends is undone by the next call of this pipeline, which waits for it"
            )


class _RankState:
    """The stages of one rank as they were."""

    def __init__(self) -> None:
        self._modules: Sequence[nn.Module] = ()
        self._snapshots = TensorsAndAttributes()
        self._attributes: Mapping[int, ModuleSnapshot] = {}
        self._modes: list[tuple[nn.Module, bool]] = []
        self._tables: list[tuple[Any, dict[str, Tensor | None]]] = []
        self._buffers, self._others = Contents(), Contents()
        self.parameters = ParametersBefore()

    def take(self, modules: Sequence[nn.Module], *, gradients: bool, copied: bool) -> None:
        """Remember what these modules have now."""
        self._modules = modules
        attributes: dict[int, dict[str, Any]] = {}
        buffers: dict[int, Any] = {}
        parameters: dict[int, Tensor] = {}
        self._modes = []
        for module in _all(modules):
            table = vars(module)
            if id(table) not in attributes:
                attributes[id(table)] = table
                self._modes.append((module, module.training))
                if module._buffers:
                    buffers[id(module._buffers)] = module._buffers
                for parameter in module._parameters.values():
                    if type(parameter) is nn.Parameter or not (parameter is None or is_away(parameter)):
                        parameters[id(parameter)] = parameter
        self._tables = [(table, dict(table.items())) for table in buffers.values()]
        if self._tables or self._buffers.kept:
            self._buffers.take(each for _, entries in self._tables for each in entries.values() if each is not None)
        self._snapshots.tensors.clear()
        self._attributes = self._snapshots.take(attributes)
        if self._snapshots.tensors or self._others.kept:
            self._others.take(self._snapshots.tensors)
        self.parameters.take(list(parameters.values()), gradients, copied)

    def put_back(self) -> None:
        """Make all of it what it was."""
        for captured in self._attributes.values():
            captured.put_back()
        self._others.put_back()
        self.put_back_buffers()
        for module, mode in self._modes:
            if module.training is not mode:
                module.training = mode
        self.parameters.put_back()

    def put_back_buffers(self) -> None:
        """Make buffers what they were."""
        for table, entries in self._tables:
            if isinstance(table, dict) and not _is_same(table, entries):  # a scripted module's cannot change
                table.clear()
                table.update(entries)
        self._buffers.put_back()

    def left_alone(self) -> None:
        """A step has ended well."""
        for contents in (self._buffers, self._others):
            if contents.kept:
                contents.left_alone()
        self.parameters.forget_gradients()

    def lost(self) -> list[str]:
        """What was written to and could not be put back, in words."""
        lost = {id(tensor) for tensor in (*self._buffers.lost, *self._others.lost)}
        found = []
        for module in _all(self._modules) if lost else ():
            for name, value in (*module._buffers.items(), *vars(module).items()):
                if id(value) in lost:
                    found.append(f"{name} of {type(module).__name__}")
        return list(dict.fromkeys(found)) or ["a tensor in a container"] * bool(lost)


class ParametersBefore:
    """The parameters of one rank as they were before a step."""

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._versions: list[int] = []  # of the parameters
        self._gradients: list[tuple[Tensor, Tensor | None, int, Tensor | None]] = []  # with its version, and a copy
        self._hooks: list[tuple[Tensor, Hooks, Hooks]] = []  # parameter, its hooks as torch has them, those held

    def take(self, parameters: list[Tensor], gradients: bool, copied: bool) -> None:
        """Remember what the parameters have now."""
        self._parameters = parameters
        self._versions = [version_of(each) for each in parameters]
        self._gradients = [_gradient(each, copied) for each in parameters] if gradients else []

    def put_back(self) -> None:
        """Give the parameters the gradients that they had."""
        for parameter, gradient, version, copy in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
            if gradient is not None and copy is not None and version_of(gradient) != version:
                with torch.no_grad():
                    gradient.copy_(copy)

    def forget_gradients(self) -> None:
        """Let go of the copies, which may be large."""
        self._gradients = []

    def versions(self) -> list[tuple[Tensor, int]]:
        """Return the parameters, each with its version now."""
        return [(parameter, version_of(parameter)) for parameter in self._parameters]

    def have_hooks(self) -> bool:
        """Return whether any of the parameters has a hook that wants its complete gradient."""
        return bool(self._hooks) or any(parameter._post_accumulate_grad_hooks for parameter in self._parameters)

    def hold_hooks(self) -> None:
        """Take the hooks that want complete gradients away from their parameters."""
        for parameter in self._parameters:
            hooks: Hooks | None = parameter._post_accumulate_grad_hooks
            if hooks:
                self._hooks.append((parameter, hooks, dict(hooks)))
                hooks.clear()

    def release_hooks(self) -> list[Callable[[], object]]:
        """Give the hooks back, and return the calls that are due: of parameters that have got a gradient."""
        before = {id(parameter): then for parameter, *then in self._gradients}
        due: list[Callable[[], object]] = []
        for parameter, hooks, held in self._hooks:
            registered_since = dict(hooks)
            hooks.clear()
            hooks.update({**held, **registered_since})
            (gradient, version, _), now = before[id(parameter)], parameter.grad
            if now is not None and (now is not gradient or version_of(now) != version):
                due.extend(partial(hook, parameter) for hook in hooks.values())
        self._hooks = []
        return due

    def written(self) -> list[Tensor]:
        """Return the parameters that were written to since."""
        pairs = zip(self._parameters, self._versions, strict=True)
        return [parameter for parameter, version in pairs if version_of(parameter) != version]


def _gradient(parameter: Tensor, copied: bool) -> tuple[Tensor, Tensor | None, int, Tensor | None]:
    gradient = parameter.grad
    if gradient is None:
        return parameter, None, 0, None
    return parameter, gradient, version_of(gradient), gradient.detach().clone() if copied else None


def _all(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """All modules inside: a stage's own, and the copies of them that run."""
    for module in modules:
        yield from getattr(module, "own_modules", module.modules)()
        running = getattr(module, "running_modules", None)
        if running is not None:
            yield from running()


def _is_same(table: Mapping[str, Any], entries: Mapping[str, Any]) -> bool:
    return list(table) == list(entries) and all(table[name] is entries[name] for name in entries)


def _listed(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return f"rank {numbers[0]} is" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))} are"
