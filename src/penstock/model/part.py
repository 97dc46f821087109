"""What the runtime knows of a stage, in whatever way the model was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from penstock.model.names import dotted_name
from penstock.model.original.settings import AttributeChange, ModuleSettings

OUTPUT = -1  # the consumer of the last stage's result: the loss, or the user
WHOLE_MODEL = 2**32  # the stream of a model that is replayed: the same in all its stages


class Names(dict[str, str]):
    """Names in a stage's module, and the names that they have in the whole model.

    Also of what was not there when the model was cut, such as a buffer that a first forward registers: `prefix` stands
    before it or, in the place of its first part, what `within` has for that.
    """

    def __init__(self, known: Mapping[str, str], prefix: str = "", within: Mapping[str, str] | None = None) -> None:
        super().__init__(known)
        self._prefix, self._within = prefix, dict(within or {})

    def __missing__(self, name: str) -> str:
        head, _, rest = name.partition(".")
        if head in self._within:
            return dotted_name(self._within[head], rest)
        return self._prefix + name

    def get(self, name: str, default: Any = None) -> Any:
        """Return the same as `names[name]`: there is an answer for every name."""
        return self[name]


class StagePart:
    """One stage: what it owns, and how it computes. Each way to cut a model has a subclass.

    `module` owns the stage's parameters and buffers; `names` maps their names there to those in the whole model.
    `copied` are the user's modules that do not run here as they are, because a copy or, where it was `captured`, a
    graph runs in their place. `takes` are the keyword arguments that it reads (None: any); with `reads_inputs` it reads
    the model's positional arguments too, wherever it stands. `stream` is what its random numbers follow from beside
    the microbatch, and `around(number)` wraps a call that has numbers of its own.

    The answers below are those of a stage that computes with its own module, and with what arrives, alone.
    """

    module: nn.Module
    names: dict[str, str]
    copied: Sequence[nn.Module] = ()
    captured = False
    takes: frozenset[str] | None = None
    reads_inputs = False
    follows = False  # whether it computes with copies of the user's modules, which must follow what is set on these

    def __init__(self, index: int) -> None:
        self.index = self.stream = index
        self.around: Callable[[int], AbstractContextManager[Any]] = lambda number: nullcontext()

    def run(self, arrived: Mapping[int, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """Compute: payload by producing stage in, payload by consuming stage out."""
        raise NotImplementedError

    def reads(self) -> Iterable[Tensor]:
        """Return buffers outside of its module that its code may read: they have to stay where they are."""
        return ()

    def settle(self) -> None:
        """Settle the stage: parameters and buffers of other stages may have no values here any more."""

    def before_sharding(self) -> None:
        """Find out what needs this process's parameters complete, before they are taken apart."""

    def poison(self) -> bool:
        """Fill values that the stage does not need with NaN, for a comparison; return whether it uses such at all."""
        return False

    def begin(self, settings: Sequence[AttributeChange]) -> None:
        """Note all attributes of the user's modules before the first step; some may be others than at the cut."""

    def follow(self, changes: Sequence[AttributeChange]) -> None:
        """Take over, before a step, attributes of the user's modules, or types of parameters, that are others now."""

    def fault(self) -> str:
        """Return what the user's model is set to that this stage cannot follow, or an empty text."""
        return ""

    def give_back(self, settings: ModuleSettings) -> None:
        """Set on the user's modules, after a step, what the code of their copies has set."""


def hang(root: nn.Module, name: str, tensor: Tensor, persistent: bool = True) -> None:
    """Put a parameter or buffer into a tree of modules under its dotted name: the object itself, not a copy."""
    *path, leaf = name.split(".")
    for step in path:
        root = root._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
    if isinstance(tensor, nn.Parameter):
        root._parameters[leaf] = tensor
    else:
        root._buffers[leaf] = tensor
        if not persistent:
            root._non_persistent_buffers_set.add(leaf)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first of the names that each parameter has, as `named_parameters` gives it, by every name."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: own[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def state_names(module: nn.Module) -> list[str]:
    """Return every name under which the module has something: parameters, all buffers, and what only its state knows.

    A buffer that is None has its name too: a forward may fill it later.
    """
    found = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for place, holder in module.named_modules(remove_duplicate=False):
        # Those of a scripted module are no dict.
        found += [dotted_name(place, name) for name, _ in holder._buffers.items()]
    return list(dict.fromkeys((*found, *module.state_dict(keep_vars=True))))
