"""Make a case that fails smaller, step by step, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fuzz.case import Case, Layer
from fuzz.run import Outcome

__all__ = ["shrink", "smaller"]

FAMILIES = ("gpipe", "1f1b", "zb-h1")  # the simplest first; always to a simpler one, so that it ends

SIMPLE: dict[str, Any] = {  # from what is most worth being rid of
    "fault": None,
    "clip": None,
    "inside": False,
    "evaluate": False,
    "skip": None,
    "shared": (),
    "side": None,
    "precision": None,
    "recompute": "never",
    "batch": "plain",
    "loss": "mse",
    "optimizer": None,
    "every": 1,
    "to_none": True,
    "where": "threads",
    "replicate": None,
    "nest": "list",
    "way": "list",
    "width": 4,
    "dtype": "float32",
    "seed": 0,
}

ALONG: dict[str, dict[str, Any]] = {
    "way": {"nest": "list"},
    "side": {"side_at": ()},
    "optimizer": {"clip": None, "inside": False},
}


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one point, the largest steps first."""
    each = len(case.stages) // case.ranks
    for fewer in range(1, case.ranks):
        for first in range(0, len(case.stages) - fewer * each + 1):
            yield replace(case, ranks=fewer, stages=case.stages[first : first + fewer * each])
    if each > 1:
        yield from (replace(case, ranks=1, stages=(stage,)) for stage in case.stages)
        yield replace(case, stages=case.stages[: case.ranks])
        yield replace(case, stages=case.stages[-case.ranks :])
    for family in FAMILIES[: FAMILIES.index(case.family)] if case.family in FAMILIES else FAMILIES:
        yield replace(case, family=family)
        if each > 1:
            yield replace(case, family=family, stages=case.stages[: case.ranks])
            yield replace(case, family=family, ranks=len(case.stages))
            yield replace(case, family=family, stages=case.stages[-case.ranks :])
    for field, value in SIMPLE.items():
        if getattr(case, field) != value and not (field == "where" and case.where not in ("threads", "threads-0")):
            yield replace(case, **{field: value}, **ALONG.get(field, {}))
    for steps in range(1, case.steps):
        yield replace(case, steps=steps)
    for count in range(1, case.microbatches):
        yield replace(case, sizes=case.sizes[:count])
    for rows in (1, 2):
        if sum(case.sizes) > rows * case.microbatches:
            yield replace(case, sizes=(rows,) * case.microbatches)
    yield from _fewer_layers(case)
    if len(case.side_at) > 1:
        yield from (replace(case, side_at=(stage,)) for stage in case.side_at)
    if case.fault is not None:
        step, stage, where, _ = case.fault
        yield from (replace(case, fault=fault) for fault in ((0, stage, where, 0), (step, stage, "forward", 0)))


def _fewer_layers(case: Case) -> Iterator[Case]:
    for number, layers in enumerate(case.stages):
        for place, layer in enumerate(layers):
            others = [layers[:place] + layers[place + 1 :]]
            if layer.kind == "Fork":  # with the Join that follows it
                others.append(layers[:place] + layers[place + 2 :])
            if layer.kind != "Dense":
                others.append((*layers[:place], Layer("Dense"), *layers[place + 1 :]))
            if layer.option:
                others.append((*layers[:place], Layer(layer.kind, 0), *layers[place + 1 :]))
            for other in others:
                yield replace(case, stages=(*case.stages[:number], other, *case.stages[number + 1 :]))
        if layers and layers[-1].kind == "Fork" and number + 1 < len(case.stages):
            after = case.stages[number + 1][1:]
            before = layers[:-1] or (Layer("Dense"),)
            yield replace(case, stages=(*case.stages[:number], before, after, *case.stages[number + 2 :]))


def shrink(case: Case, outcome: Outcome, run: Callable[[list[Case]], list[Outcome]], tries: int = 400) -> Case:
    """The smallest found that ends in the same way. `run` takes some at a time: processes have one launch for them."""
    together = 1 if case.where.startswith("threads") else 12
    while tries > 0:
        waiting = [other for other in smaller(case) if other != case and other.fits()]
        found = None
        while waiting and found is None and tries > 0:
            some, waiting = waiting[:together], waiting[together:]
            some = [other for other in some if _processes(other) == _processes(some[0])]
            tries -= len(some)
            ends = run(some)
            found = next((other for other, end in zip(some, ends, strict=True) if end.like(outcome)), None)
        if found is None:
            break
        case = found
    return case


def _processes(case: Case) -> int:
    return case.ranks * (2 if case.replicate else 1)
