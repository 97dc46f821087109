"""Whose memory is it: the one rule for memory that two could hold while one of them writes.

Several microbatches are under way at once, so memory lives longer than in a plain loop, and a write that is harmless
there would change what a neighbour still reads. The rule goes by storage, and asks at the moment of handing over:

    handed over              who else may hold it, and write            what is done
    a stage's output         the stage: a buffer, an attribute          it leaves as a copy
    what a stage receives    the sender, another reader                 a stage that writes works on a copy
    the model's inputs       the user, other microbatches and stages    likewise
    a gradient on its way    a parameter that adopted it as `.grad`,    the parameter gets a copy
                             to which the next microbatch is added
                             whatever else has it: a backward's own     it leaves as a copy
                             memory, a tensor that is no parameter

(The rows of gradients are in `backward/saved_graph`.) Tensors in one storage are copied together, so that they share
memory in the copies as well. Nothing is copied in the common case: which outputs are a stage's own its first forward
shows, and of a gradient torch counts the holders of its storage.

Whatever else may write, such as a global that a stage returns, is seen by the version counter that all tensors of a
storage share: after the reader's forward, before a recomputation, before `W`, and by autograd itself for what a graph
has saved. That is an error, and never a wrong number. (A write past that counter, by `.data` or numpy, into what a
graph has saved is seen by nobody, as in any program that runs two forwards before the first backward.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ModelError, RunError
from penstock.model.part import StagePart
from penstock.runtime.state.hidden_tensors import tensors_in
from penstock.runtime.state.memory_layout import is_plain, more_than_numbers, same_bits, storage_of, with_copies

Watched = list[tuple[Tensor, int]]  # tensors, and the versions that they had

Run = Callable[[Mapping[int, Any], tuple[Any, ...], Mapping[str, Any]], dict[int, Any]]

use_count = torch._C._storage_Use_Count  # of a storage: the tensors in it, and its own object
ONE_HOLDER = 2  # the count of a storage in which one tensor is


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to; tensors of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def holders(tensor: Tensor) -> int:
    """How many tensors are in this tensor's storage, itself included; what a graph has saved counts too."""
    return int(use_count(tensor.untyped_storage()._cdata)) - 1


class GuardedPart:
    """Runs the part of one stage by the rule above: on what it may write to, and so that what it emits may leave."""

    def __init__(self, part: StagePart, module: nn.Module) -> None:
        self._part = part
        self.wrap: Callable[[Run], Run] | None = None  # around the part's own computing
        self.others_take: Sequence[frozenset[str] | None] = ()  # the keyword arguments of other stages
        self._received = Received(part.index)
        self._entered = Received(part.index, "the model's input")
        self.outgoing = OutgoingValues(part.index, module)

    def run(
        self,
        arrived: Mapping[int, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        final: int | None,
        recording: AbstractContextManager[object] | None = None,
    ) -> dict[int, Any]:
        """Run the part, inside of `recording` if any. `final`: the output that leaves the pipeline, of any type."""
        part = self._part
        run = part.run if self.wrap is None else self.wrap(part.run)
        received: Watched = []
        entered: Watched = []
        if arrived:
            arrived, received = self._received.hand(arrived)
        if kwargs:
            (args, kwargs), entered = self._entered.hand((args, kwargs))
        elif not arrived or part.reads_inputs:
            args, entered = self._entered.hand(args)
        try:
            if recording is None:
                emitted = run(arrived, args, kwargs)
            else:
                with recording:
                    emitted = run(arrived, args, kwargs)
        except RuntimeError as error:
            if arrived and "a leaf Variable that requires grad" in str(error):
                raise ModelError(self._received.late()) from error
            raise
        if received:
            self._received.learn(received)
        if entered and (written := self._entered.learn(entered)):
            self._check_alone(kwargs, written)
        self.outgoing.fit(emitted, final)
        return emitted

    def _check_alone(self, kwargs: Mapping[str, Any], written: Sequence[Tensor]) -> None:
        """In a plain loop, what a stage writes into a keyword argument is seen by the stages behind it."""
        shared = [name for name in kwargs if any(takes is None or name in takes for takes in self.others_take)]
        for name in shared:
            if any(leaf is tensor for leaf in pytree.tree_leaves(kwargs[name]) for tensor in written):
                raise ModelError(
                    f"stage {self._part.index} writes in place into the keyword argument {name!r}, which another stage "
                    f"takes too and would get as it was; clone() it before it is written to, or pass it on as an output"
                )


# -- what leaves a stage


class OutgoingValues:
    """What one stage emits, made fit to leave: nothing in it is in memory that the stage will write to again.

    The first forward of each mode shows whether the stage emits memory of its own: a buffer, a parameter, a tensor in
    an attribute. If so, every forward is looked at, and such tensors leave as copies. If not, all leave as they are; if
    a later forward emits its own memory after all, and writes to it, the reader finds that out by its version.
    """

    carried: tuple[type[Tensor], ...] = ()  # kinds of tensors that are packed on their way, and made again

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._emits_own: dict[tuple[bool, bool], bool] = {}  # by whether gradients are on, and the stage's mode

    def fit(self, emitted: dict[int, Any], final: int | None) -> None:
        """Copy what is the stage's own. `final`: the output that leaves the pipeline and may be any object."""
        for target, payload in emitted.items():
            if target != final and not _is_tensors(payload):
                self._check_leaves(pytree.tree_leaves(payload))
        mode = torch.is_grad_enabled(), self._module.training
        if self._emits_own.get(mode, True):
            copied = self._copy_own(emitted)
            self._emits_own.setdefault(mode, copied)

    def _copy_own(self, emitted: dict[int, Any]) -> bool:
        """Exchange tensors in the stage's own memory for copies; return whether there were any."""
        own = {storage_of(tensor) for tensor in _tensors_of(self._module)}
        copied = False
        for target, payload in emitted.items():
            leaves, spec = pytree.tree_flatten(payload)
            places = [place for place, leaf in enumerate(leaves) if is_plain(leaf) and storage_of(leaf) in own]
            if places:
                emitted[target] = pytree.tree_unflatten(with_copies(leaves, places)[0], spec)
                copied = True
        return copied

    def _check_leaves(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if not isinstance(leaf, self.carried) and (kind := more_than_numbers(leaf)) is not None:
                    raise ModelError(
                        f"stage {self._stage} returns a {kind}; only plain dense tensors cross to another stage, and "
                        f"the next one would get less than that: return plain tensors (.as_subclass(torch.Tensor), a "
                        f"DTensor's .to_local(), a nested tensor's .values() and .offsets()) and make it again there, "
                        f"or cut the model where it is not in use"
                    )
            elif leaf is not None and any(True for _ in tensors_in(leaf)):
                name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
                raise ModelError(
                    f"stage {self._stage} returns a {name} that holds tensors, which torch does not know as a "
                    f"container: their gradients would be lost on the way; register it with "
                    f"torch.utils._pytree.register_dataclass or register_pytree_node, or return a dict or a tuple"
                )


def _is_tensors(payload: Any) -> bool:
    """Return whether it is a plain tensor, or a tuple or list of such: nothing in it that could be lost."""
    leaves = payload if type(payload) in (tuple, list) else (payload,)
    return all(leaf is None or (type(leaf) is Tensor and not leaf.is_nested) for leaf in leaves)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Buffers, parameters and attributes of all modules, also inside of containers."""
    running = getattr(module, "running_modules", module.modules)
    for each in running():
        for value in vars(each).values():
            yield from filter(is_plain, tensors_in(value))


# -- what a stage is handed


class Received:
    """What a stage is handed, and whether it writes into it, as `nn.ReLU(inplace=True)` does where it comes first.

    Most stages do not, and a copy would be memory held until the backward. So a stage is handed copies in its first
    forward (one for training, one for inference), and their versions tell: if it writes, it gets copies ever after;
    if not, the values themselves, and a write that comes later is an error. A stage that calls `retain_grad()` on what
    it is handed gets copies too: the values themselves are leaves here, whose gradients go back to the stage before.
    """

    def __init__(self, stage: int, what: str = "a value that it received") -> None:
        self._stage = stage
        self._what = what
        self._writes: dict[bool, bool] = {}  # or retains gradients; by whether gradients are on
        self._parted = False  # the last copies do not overlap where the originals do
        self._originals: list[Any] = []  # of the copies of a first forward

    def hand(self, value: Any) -> tuple[Any, Watched]:
        """What the stage works on, and what to look at when it has."""
        writes = self._writes.get(torch.is_grad_enabled())
        if writes is False:
            return value, versions(value)
        leaves, spec = pytree.tree_flatten(value)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not writes:
            self._originals = [leaves[place] for place in places]
        leaves, self._parted = with_copies(leaves, places)
        if writes:
            self._check_together()
        value = pytree.tree_unflatten(leaves, spec)
        return value, [] if writes else versions(value)

    def learn(self, watched: Watched) -> list[Tensor]:
        """After the run: what it has written to."""
        mode = torch.is_grad_enabled()
        written = [tensor for tensor, version in watched if version_of(tensor) != version]
        if mode not in self._writes:
            # `.data`, numpy and kernels of other libraries write past versions
            originals, self._originals = self._originals, []
            if not written:
                pairs = zip(watched, originals, strict=True)
                written = [tensor for (tensor, _), original in pairs if not same_bits(tensor, original)]
            self._writes[mode] = bool(written) or any(tensor.retains_grad for tensor, _ in watched)
            if written:
                self._check_together()
        elif written:
            raise ModelError(self.late())
        return written

    def _check_together(self) -> None:
        if self._parted:
            raise ModelError(
                f"stage {self._stage} writes in place into what it receives, of which two tensors overlap in memory "
                f"that neither holds as a whole: clone() one of them where it is made, or where it is written to"
            )

    def late(self) -> str:
        """The stage writes, and did not the first time; or somebody else does."""
        return (
            f"{self._what} was written to in place while stage {self._stage} ran, and not in the stage's first "
            f"forward: by the stage itself, or by the one that made the value and uses its memory again; clone() it "
            f"before it is written to"
        )


def versions(value: Any) -> Watched:
    """Return the tensors of a value and their versions; of most values without the pytree machinery."""
    found: Watched = []
    rest = [value]
    while rest:
        each = rest.pop()
        kind = type(each)
        if kind is Tensor:
            found.append((each, version_of(each)))
        elif kind is dict:
            rest.extend(reversed(each.values()))
        elif kind is tuple or kind is list:
            rest.extend(reversed(each))
        elif each is not None:
            return [(leaf, version_of(leaf)) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def check_unwritten(what: str, watched: Watched, how: str) -> None:
    """What is read a second time must be as it was."""
    if any(version_of(tensor) != version for tensor, version in watched):
        raise RunError(f"{what} was written to in place {how}; clone() it before it is written to")
