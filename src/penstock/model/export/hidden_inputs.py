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
from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.export.effects import Where

__all__ = ["Draws", "watched_calls"]

Result = TypeVar("Result")

_MEASURES = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_CLOCKS = frozenset(_MEASURES) | {f"{name}_ns" for name in _MEASURES} | {"localtime", "gmtime", "ctime"}
_DRAWS = frozenset({"random", "getrandbits"})  # all other methods of Python's generators come to these
_TODAY = frozenset({"now", "utcnow", "today"})
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _hidden(where: str, what: str) -> ModelError:
    """For a forward that reads something which a graph would have built in."""
    return ModelError(
        f"{where} reads {what}, and a captured graph would keep what it read in the capture, for ever; draw with torch "
        f"(torch.rand), pass it to the model as an input, or switch that off (layerdrop=0, mask_time_prob=0)"
    )


@contextmanager
def watched_calls(where: Where) -> Iterator[None]:
    """Around a plain forward in this thread: a call of a clock or of one of Python's generators is an error."""
    found: list[tuple[str, str]] = []

    def look(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and not found:
            what = _source(called)
            if what and not frame.f_code.co_filename.startswith(_TORCH):
                found.append((str(where), what))

    before = sys.getprofile()
    with where.watched():
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)
    if found:
        raise _hidden(*found[0])


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


class Draws:
    """Whether runs of a model draw from Python's or numpy's generators.

    In a capture torch's must not move either, because its operations do not draw then; but generators that do not
    belong to the model may, because export has some of its own. A generator that moves may have been drawn from by
    another thread: it counts if it moves again in a second run.
    """

    def __init__(self, model: nn.Module, *, capture: bool) -> None:
        self._model, self._torchs = model, capture
        self._generators, self._usual = _generators(model, everywhere=not capture), _global_states()
        self._moved: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around one run."""
        before = _states(self._generators, self._torchs)
        yield
        now = _states(self._generators, self._torchs)
        self._moved = {whose for (whose, was), (_, is_now) in zip(before, now, strict=True) if was != is_now}

    def never(self, run: Callable[[], Result]) -> Result:
        """What `run`, which goes through `watched`, returns, if it does not draw."""
        for _ in range(2):
            result = run()
            if not self._moved:
                return result
        _put_back(self._usual)
        raise _hidden(type(self._model).__name__, f"random numbers of {' and '.join(sorted(self._moved))}")


def _generators(model: nn.Module, everywhere: bool) -> list[Any]:
    """Those that modules have as attributes, and all others that there are in Python."""
    numpy: Any = sys.modules.get("numpy")
    kinds = {random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState))}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    found = [value for value in attributes if isinstance(value, (torch.Generator, *kinds))]
    return found + [each for each in gc.get_objects() if type(each) in kinds] if everywhere else found


def _states(generators: list[Any], torchs: bool) -> list[tuple[str, Any]]:
    """(whose, its state) of each."""
    python, array, tensor = _global_states()
    found: list[tuple[str, Any]] = [("Python's random", python), ("numpy's random", repr(array))]
    if torchs:
        found.append(("torch's generator, past its operations", tensor.tolist()))
    for each in generators:
        if isinstance(each, random.Random):
            found.append(("Python's random", each.getstate()))
        elif not isinstance(each, torch.Generator):
            bits = each.bit_generator if hasattr(each, "bit_generator") else each._bit_generator
            found.append(("numpy's random", repr(bits.state)))
        elif torchs:
            found.append(("a torch.Generator", each.get_state().tolist()))
    return found


def _global_states() -> tuple[Any, Any, Tensor]:
    numpy: Any = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()


def _put_back(states: tuple[Any, Any, Tensor]) -> None:
    python, array, tensor = states
    random.setstate(python)
    torch.set_rng_state(tensor)
    if array is not None:
        sys.modules["numpy"].random.set_state(array)
