"""What a forward reads beside its arguments and its model: random numbers that are not torch's, and clocks.

A captured graph would have one draw built in for ever: layer drop by `random.random() < 0.5` would train the same
layers in every step. So such a model is refused. Two looks find it. A plain run of the forward is watched call by
call, in this thread alone, for Python's generators and for clocks. And around such a run and around every capture the
states of generators are compared, numpy's as well, whose calls cannot be watched.
"""

from __future__ import annotations

import datetime
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.errors import ModelError
from penstock.model.export.effects import RunningModule
from penstock.model.random_states import generators_of, global_states, put_back, states_of

Result = TypeVar("Result")

_MEASURES = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_CLOCKS = frozenset(_MEASURES) | {f"{name}_ns" for name in _MEASURES} | {"localtime", "gmtime", "ctime"}
_DRAWS = frozenset({"random", "getrandbits"})  # all other methods of Python's generators come to these
_TODAY = frozenset({"now", "utcnow", "today"})
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _refusal(where: str, what: str) -> ModelError:
    """The error for a forward that reads something which a graph would have built in."""
    return ModelError(
        f"{where} reads {what}, and a captured graph would keep what it read in the capture, for ever; draw with torch "
        f"(torch.rand), pass it to the model as an input, or switch that off (layerdrop=0, mask_time_prob=0)"
    )


@contextmanager
def watched_calls(where: RunningModule) -> Iterator[None]:
    """A context around a plain forward: a call of a clock or of one of Python's generators is an error."""
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
    """What a built-in function reads that no one gave it; mostly nothing."""
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
        """What `run`, which goes through `watched`, returns, if it does not draw."""
        for _ in range(2):
            result = run()
            if not self._moved:
                return result
        put_back(self._usual)
        raise _refusal(type(self._model).__name__, f"random numbers of {' and '.join(sorted(self._moved))}")
