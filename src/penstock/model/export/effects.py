"""What a forward does beside computing its output, and what it reads beside its arguments, while it is captured.

The capture runs the forward on fake tensors, none of which may stay in the model: attributes, and the lists and dicts
in them, are put back. And what one forward leaves for the next is not in the graph of one forward. So an attribute that
the forward changes is taken away before a second capture: a forward that reads it before writing it carries state from
call to call (a counter, a memory), which is refused, while a stash that the parent reads afterwards works. The backward
of a custom `autograd.Function` and hooks on tensors would be lost without a word, and are refused as well.

A graph would also have one draw built in for ever: layer drop by `random.random() < 0.5` would train the same layers
in every step. So random numbers that are not torch's, and clocks, are refused. A plain run is watched call by call, in
this thread alone; around it and around every capture the states of generators are compared, because calls of numpy
cannot be watched.
"""

from __future__ import annotations

import datetime
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from penstock.errors import ModelError
from penstock.model.names import dotted_name
from penstock.model.random_states import generators_of, global_states, put_back, states_of
from penstock.model.replay.recording.undo import contents_of, refill

# the last two are nn.LSTM's own copies of its parameters, which follow when those are exchanged for fakes
INTERNAL = frozenset(vars(nn.Module())) | {"forward", "_flat_weights", "_flat_weight_refs"}
# what checkpoint uses to mark its inputs, and the backward of a torch.library.custom_op, which stays one operation
HARMLESS = ("torch.utils.checkpoint._NoopSaveInputs", "torch._library.autograd.GeneratedBackwardFor")
_MISSING = object()


class _Taken:
    """Stands for an attribute that the forward must write before it reads it: a read is refused."""

    def __init__(self, owner: str, name: str) -> None:
        self.__dict__["_where"] = dotted_name(owner, name)

    def _read(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            f"the model's forward changes self.{self.__dict__['_where']} and reads it in the next call; a captured "
            f"graph would keep the value of the capture. Make it a registered buffer that is changed in place, or, if "
            f"it is a cache, run the model once before so that it is filled"
        )

    __getattr__ = __setattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __contains__ = _read
    __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _read
    __mod__ = __floordiv__ = __pow__ = __matmul__ = __rmatmul__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _read
    __int__ = __float__ = __index__ = __call__ = _read
    __eq__ = __ne__ = _read
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                value._read()
        return NotImplemented


class Effects:
    """The attributes that forwards of this model change."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self.changed: set[tuple[str, str]] = set()  # (module, attribute)
        self.before: list[Tensor] = []  # what stood in changed attributes and containers before

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put back, after an export, the attributes' own objects; it leaves equal ones."""
        kept = {name: dict(vars(module)) for name, module in self._modules.items()}
        try:
            yield
        finally:
            for name, attributes in kept.items():
                now = self._modules[name].__dict__
                now.update({key: value for key, value in attributes.items() if key not in INTERNAL})

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Let every module have, after one forward, the attributes that it had."""
        kept = {name: dict(vars(module)) for name, module in self._modules.items()}
        inner = {id(box): (box, contents_of(box)) for box in self._containers()}
        for name, attribute in self.changed:
            self._modules[name].__dict__[attribute] = _Taken(name, attribute)
        try:
            yield
        finally:
            for name, module in self._modules.items():
                self._put_back(name, module.__dict__, kept[name])
            for box, contents in inner.values():
                if not _same(contents_of(box), contents):
                    values = [each[1] if isinstance(box, dict) else each for each in contents]
                    self.before += [value for value in values if isinstance(value, Tensor)]
                    refill(box, contents)

    @contextmanager
    def buffers_written(self) -> Iterator[None]:
        """Turn a buffer that a forward replaces into one that it writes in place: an operation of the graph.

        torch.export does so for the outermost module alone and forgets the others.
        """
        tables = [
            (name, table, dict(table))
            for name, module in self._modules.items()
            for table in (module._buffers, module._parameters)
        ]
        yield
        for name, table, before in tables:
            for leaf in set(table) | set(before):
                old, new = before.get(leaf), table.get(leaf)
                if new is old:
                    continue
                if old is None or new is None or isinstance(old, nn.Parameter) or old.shape != new.shape:
                    raise ModelError(
                        f"the model's forward replaces {dotted_name(name, leaf)} by something that is not a buffer of "
                        f"the same shape; a captured graph cannot do that. Keep its shape, or pass a list of stage "
                        f"modules"
                    )
                old.copy_(new.detach())
                table[leaf] = old

    def _put_back(self, name: str, now: dict[str, Any], then: dict[str, Any]) -> None:
        for attribute in set(now) | set(then):
            old = then.get(attribute, _MISSING)
            if attribute in INTERNAL or now.get(attribute, _MISSING) is old:
                continue
            self.changed.add((name, attribute))
            if isinstance(old, Tensor):
                self.before.append(old)
            if old is _MISSING:
                now.pop(attribute, None)
            else:
                now[attribute] = old

    def _containers(self) -> Iterator[Any]:
        for module in self._modules.values():
            values = [value for name, value in vars(module).items() if name not in INTERNAL]
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    values += [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
            yield from (value for value in values if type(value) in (list, dict, set))


def _same(one: list[Any], other: list[Any]) -> bool:
    """Return whether a container holds the same objects as before: tensors do not answer == with a truth value."""
    keys = [[tuple(map(id, each)) if type(each) is tuple else id(each) for each in box] for box in (one, other)]
    return keys[0] == keys[1]


class RunningModule:
    """The module whose forward runs, so that an error can name it."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[nn.Module] = []
        self._thread = threading.get_ident()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow calls of modules in this thread; after a failure the stack stays as it was."""
        enter = nn_module.register_module_forward_pre_hook(self._enter)
        leave = nn_module.register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() == self._thread and id(module) in self._names:
            self._stack.append(module)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if threading.get_ident() == self._thread and self._stack and self._stack[-1] is module:
            self._stack.pop()

    def __str__(self) -> str:
        if not self._stack:
            return "the model"
        name, kind = self._names[id(self._stack[-1])], type(self._stack[-1]).__name__
        return f"module {name!r} ({kind})" if name else f"the model's own forward ({kind})"


@contextmanager
def nothing_lost(where: RunningModule) -> Iterator[None]:
    """Refuse, in this thread, what autograd would do and a graph of the forward does not show."""
    thread = threading.get_ident()
    apply, hook = vars(torch.autograd.Function)["apply"], vars(Tensor)["register_hook"]

    def guarded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not f"{cls.__module__}.{cls.__qualname__}".startswith(HARMLESS):
            raise ModelError(
                f"{where} uses the autograd.Function {cls.__qualname__}, whose own backward would not be in a captured "
                f"graph; write it with torch.library.custom_op and register_autograd, or pass a list of stage modules"
            )
        return apply.__func__(cls, *args, **kwargs)

    def guarded_hook(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise ModelError(
                f"{where} registers a hook on a tensor in its forward, which would not be in a captured graph; "
                f"use an operation instead, or pass a list of stage modules"
            )
        return hook(self, *args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(guarded_apply))  # noqa: B010
    setattr(Tensor, "register_hook", guarded_hook)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", apply)  # noqa: B010
        setattr(Tensor, "register_hook", hook)  # noqa: B010


Result = TypeVar("Result")

_MEASURES = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_CLOCKS = frozenset(_MEASURES) | {f"{name}_ns" for name in _MEASURES} | {"localtime", "gmtime", "ctime"}
_DRAWS = frozenset({"random", "getrandbits"})  # all other methods of Python's generators come to these
_TODAY = frozenset({"now", "utcnow", "today"})
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _refusal(where: str, what: str) -> ModelError:
    return ModelError(
        f"{where} reads {what}, and a captured graph would keep what it read in the capture, for ever; draw with torch "
        f"(torch.rand), pass it to the model as an input, or switch that off (layerdrop=0, mask_time_prob=0)"
    )


@contextmanager
def watched_calls(where: RunningModule) -> Iterator[None]:
    """Refuse a call of a clock or of one of Python's generators inside of a plain forward."""
    found: list[tuple[str, str]] = []

    def on_call(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and not found:
            what = _source(called)
            if what and not frame.f_code.co_filename.startswith(_TORCH):
                found.append((str(where), what))

    before, collects = sys.getprofile(), gc.isenabled()
    with where.watched():
        gc.disable()  # what is called when garbage is collected (`gc.callbacks`) would be taken for the model's
        sys.setprofile(on_call)
        try:
            yield
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()
    if found:
        raise _refusal(*found[0])


def _source(called: Any) -> str:
    """Describe what a built-in function reads that no one gave it; mostly nothing."""
    name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
    if name in _DRAWS and isinstance(owner, random.Random):
        return "random numbers of Python's random"
    if name in _CLOCKS and getattr(called, "__module__", "") == "time":
        return f"a clock (time.{name})"
    if name in _TODAY and isinstance(owner, type) and issubclass(owner, datetime.date):
        return f"a clock ({owner.__name__}.{name})"
    return "random numbers of the operating system" if name == "urandom" else ""


class RandomDraws:
    """Whether runs of a model draw from Python's or numpy's generators.

    In a capture torch's must not move either, because its operations do not draw then; but generators that do not
    belong to the model may, because export has some of its own. A generator that moves may have been drawn from by
    another thread: it counts if it moves again in a second run.
    """

    def __init__(self, model: nn.Module, *, capture: bool) -> None:
        self._model, self._torchs = model, capture
        self._generators, self._usual = generators_of(model, everywhere=not capture), global_states()
        self._moved: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = states_of(self._generators, self._torchs)
        yield
        now = states_of(self._generators, self._torchs)
        self._moved = {whose for (whose, was), (_, is_now) in zip(before, now, strict=True) if was != is_now}

    def never(self, run: Callable[[], Result]) -> Result:
        """Return what `run`, which goes through `watched`, returns; refuse one that draws."""
        for _ in range(2):
            result = run()
            if not self._moved:
                return result
        put_back(self._usual)
        raise _refusal(type(self._model).__name__, f"random numbers of {' and '.join(sorted(self._moved))}")
