"""Skip connections as torchgpipe's users write them: `@skippable`, and `stash` and `pop` that a forward yields.

What they mean, and how the values travel between stages, is in `model.declared_skips`; here is the notation. These
layers work in `GPipe`, in a `Pipeline` with any schedule, and in a plain `nn.Sequential`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import nn

from penstock.compat.torchgpipe.errors import WrongTypeError
from penstock.errors import RunError
from penstock.model.declared_skips import DeclaresSkips, SkipKey, take_skip, waiting_skips

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]


@dataclass(frozen=True, order=True)
class Namespace:
    """Something that the names of skips are unique in: `layer.isolate(Namespace())`. A copy is the same namespace.

    Args:
        id: What identifies it. By default, a new random text.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, eq=False, slots=True)
class stash:
    """`yield stash("name", value)` in a layer's forward keeps a value for the layer that pops it; `None` is a value.

    Args:
        name: The name of the skip.
        tensor: The value.
    """

    name: str
    tensor: Any


@dataclass(frozen=True, slots=True)
class pop:
    """`value = yield pop("name")` in a layer's forward takes what an earlier layer has stashed.

    Args:
        name: The name of the skip.
    """

    name: str


class Skippable(DeclaresSkips):
    """What `@skippable` makes of a class: a layer around a `module` of that class.

    Args:
        *args: As of the class.
        **kwargs: As of the class.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Put the names of the skips into a namespace, and return the layer.

        Args:
            ns: The namespace.
            only: The names that go into it. By default, all.
        """
        if only is None:
            names: Iterable[str] = self.stashable_names | self.poppable_names
        else:
            names = (only,) if isinstance(only, str) else only
        self.namespaces.update(dict.fromkeys(names, ns))
        return self

    def namespaced(self, name: str) -> SkipKey:
        """Return the key of a name: (namespace, name).

        Args:
            name: The name of a skip.
        """
        return self.namespaces.get(name), name

    def stashable(self) -> Iterable[SkipKey]:
        """Return the keys of what it stashes."""
        return map(self.namespaced, sorted(self.stashable_names))

    def poppable(self) -> Iterable[SkipKey]:
        """Return the keys of what it pops."""
        return map(self.namespaced, sorted(self.poppable_names))

    def forward(self, input: Any) -> Any:
        """Return the output of the wrapped forward, with its stashes and pops carried out.

        Args:
            input: The input of the layer.
        """
        arrived = {}
        for key in self.poppable():
            try:
                arrived[key[1]] = take_skip(key)
            except KeyError:
                raise RunError(f"{self._who()} pops {key[1]!r}, which no layer before it has stashed") from None
        stashed: dict[str, Any] = {}
        output = self._carry_out(self.module(input), arrived, stashed)
        if missing := sorted(self.stashable_names - stashed.keys()):
            raise RunError(f"{self._who()} declares that it stashes {_listed(missing)}, and its forward has not")
        if arrived:
            raise RunError(f"{self._who()} declares that it pops {_listed(sorted(arrived))}, and its forward has not")
        waiting_skips().update({self.namespaced(name): value for name, value in stashed.items()})
        return output

    def _carry_out(self, made: Any, arrived: dict[str, Any], stashed: dict[str, Any]) -> Any:
        """Follow a generator's commands to its end; what is no generator is the output itself."""
        if not isinstance(made, Generator):
            return made
        answer: Any = None
        while True:
            try:
                command = made.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(command, stash):
                if command.name not in self.stashable_names:
                    raise RunError(
                        f"{self._who()} stashes {command.name!r} without declaring it: @skippable(stash=[...])"
                    )
                stashed[command.name] = command.tensor
            elif isinstance(command, pop):
                if command.name not in self.poppable_names:
                    raise RunError(f"{self._who()} pops {command.name!r} without declaring it: @skippable(pop=[...])")
                if command.name not in arrived:
                    raise RunError(f"{self._who()} pops {command.name!r} twice; keep the value in a variable")
                answer = arrived.pop(command.name)
            else:
                raise WrongTypeError(f"{self._who()} yields {command!r}; a forward yields stash(...) and pop(...)")

    def _who(self) -> str:
        return f"the layer {type(self).__name__}"


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare the skips of a layer's class: `@skippable(stash=["early"])`, `@skippable(pop=["early"])`.

    Args:
        stash: Names of the values that the layer stashes.
        pop: Names of the values that the layer pops.
    """
    stashes, pops = frozenset(stash), frozenset(pop)

    def declared(kind: type[nn.Module]) -> type[Skippable]:
        members = {
            "module_cls": kind,
            "stashable_names": stashes,
            "poppable_names": pops,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        found = type(kind.__name__, (Skippable,), members)
        kind.__qualname__ += ".module_cls"  # The layer has its own name now; by this one it can be unpickled.
        return found

    return declared


def verify_skippables(module: nn.Sequential) -> None:
    """Raise `TypeError` unless every skip has one stash and, after it, one pop; the message names all that are wrong.

    A name can be used by several pairs if each pair has a namespace: `layer.isolate(namespace)`.

    Args:
        module: The model.
    """
    faults: list[str] = []
    stashed: dict[SkipKey, str] = {}
    popped: set[SkipKey] = set()
    for place, layer in module.named_children():
        if not isinstance(layer, Skippable):
            continue
        both = layer.stashable_names & layer.poppable_names
        faults += [f"layer {place!r} declares {name!r} for stash and for pop" for name in sorted(both)]
        for key in map(layer.namespaced, sorted(layer.stashable_names - both)):
            if key in stashed:
                faults.append(f"layer {place!r} stashes {key[1]!r} again, after layer {stashed[key]!r}; isolate them")
            stashed.setdefault(key, place)
        for key in map(layer.namespaced, sorted(layer.poppable_names - both)):
            if key in popped:
                faults.append(f"layer {place!r} pops {key[1]!r} again; isolate the pairs")
            elif key not in stashed:
                faults.append(f"layer {place!r} pops {key[1]!r}, which no layer before it stashes")
            else:
                popped.add(key)
    faults += [f"no layer pops {key[1]!r} of layer {place!r}" for key, place in stashed.items() if key not in popped]
    if faults:
        raise WrongTypeError("skips without one stash and one pop each:\n" + "\n".join(f"  {each}" for each in faults))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
