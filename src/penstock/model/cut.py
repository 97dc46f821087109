"""Ways to cut a model, tried in order; one result type.

    position   lists of stage modules, and `nn.Sequential`
    replay     any module, with an example: every stage runs the model's own forward
    graph      any module that torch.export can capture, with an example

`CutOptions(method="auto")` takes the first that applies and says which, and why the others did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from torch import nn

from penstock.errors import ModelError, UsageError
from penstock.model.balance.partition import counts_of
from penstock.model.balance.profile import Weight, crossing_of, profile_layers
from penstock.model.balance.request import Balancing, stage_count
from penstock.model.by_position import layers_of, more_than_its_layers, split_by_position
from penstock.model.cut_options import CutOptions
from penstock.model.lazy import check_values, is_lazy
from penstock.model.replay.cut import split_by_replay
from penstock.model.staged_model import StagedModel, doubts_about

Example = tuple[Any, ...] | Mapping[str, Any]


def cut_model(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None,
    *,
    balance: Balancing | str | Sequence[int] | Mapping[str, float] | None = None,
    example: Example | None = None,
    split_at: Sequence[str] = (),
    options: CutOptions = CutOptions(),
) -> StagedModel:
    """Cut a model into stages; the result has doubts about them where it was not the user who chose them."""
    balance = balance if isinstance(balance, Balancing) else Balancing(balance)
    found = _cut(model, stages, balance, example, split_at, options)
    if balance.counts is not None or split_at or not isinstance(model, nn.Module):
        return found
    by_parameters = balance.how in (None, "parameters") and balance.speeds is None
    return replace(found, doubts=doubts_about(found, by_parameters, balance.schedule_for))


def _cut(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None,
    balance: Balancing,
    example: Example | None,
    split_at: Sequence[str],
    options: CutOptions,
) -> StagedModel:
    method, skips = options.method, options.skips
    for part in [model] if isinstance(model, nn.Module) else model:
        if isinstance(part, nn.Module):  # what else is in a list is refused further down
            check_values(part)
    if method == "auto" and example is None and split_at and balance.how is None and balance.speeds is None:
        counts = _counts_at(model, stages, split_at)
        if counts is not None:
            balance, split_at = replace(balance, how=counts), ()
    listed = not isinstance(model, nn.Module) or isinstance(model, (nn.Sequential, nn.ModuleList))
    if example is not None and more_than_its_layers(model):
        listed = False
    if method == "position" or (method == "auto" and listed and not split_at):
        if split_at:
            raise UsageError("CutOptions(method='position') takes balance=[counts]; names need method='replay'")
        return _by_position(model, stages, balance, skips, example)
    if not isinstance(model, nn.Module):
        raise UsageError("a list of stage modules is cut already; leave cut_options=, split_at= and balance= out")
    if list(skips):
        raise UsageError("CutOptions(skips=) is for lists of stage modules; in other models skips are found")
    if stages is None and not split_at and balance.counts is None:
        raise ModelError("say how many stages to cut the model into: stages=2, or split_at=[names]")
    if example is None:
        raise ModelError(
            f"cutting a {type(model).__name__} needs one input to look at: pass example=(x,), or a dict of keyword "
            f"arguments"
        )
    replay = partial(split_by_replay, model, stages, example, balance, split_at)
    graph = partial(_graph, method == "auto", model, stages, example, balance, split_at)
    return _first_that_applies({"replay": replay, "graph": graph}, method)


def _counts_at(model: nn.Module | Sequence[nn.Module], stages: int | None, split_at: Sequence[str]) -> list[int] | None:
    """Return layers per stage where the names are layers of an `nn.Sequential`: that needs no look at an input."""
    if not isinstance(model, nn.Sequential):
        return None
    layers = [name for name, _ in layers_of(model)]
    if not set(split_at) <= set(layers):
        return None  # a place inside of a layer
    stage_count(stages, None, split_at)  # refuses another number
    cuts = [layers.index(name) for name in split_at]
    if cuts != sorted(set(cuts)):
        raise ModelError(f"split_at={list(split_at)} is not in the order in which the model calls its layers")
    if cuts[0] == 0:
        raise ModelError(f"split_at={list(split_at)}: the stage before {split_at[0]!r} would have no layer")
    return counts_of(cuts, len(layers))


def _by_position(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None,
    balance: Balancing,
    skips: Iterable[tuple[int, int]],
    example: Example | None,
) -> StagedModel:
    """Cut by equal counts unless something else was asked for; lists are cut already."""
    weighed = balance.how is not None and balance.counts is None
    if not isinstance(model, nn.Sequential) or (stages is None and weighed):
        if weighed:
            raise UsageError("balance= by weight needs stages=, and either an nn.Sequential or example=")
        return split_by_position(model, stages, balance.counts, skips)
    layers = layers_of(model)
    if balance.runs and (example is None or isinstance(example, Mapping)):
        raise UsageError(f"balance={balance.how!r} measures the layers with an input: pass example=(x,)")
    weights = profile_layers(layers, tuple(example) if balance.runs and example else None, **balance.profiling)
    counts = balance.counts
    if stages is not None and (weighed or (counts is None and balance.speeds is not None)):
        counts = counts_of(balance.cuts(stages, weights, None, crossing_of(weights)), len(layers))
    return _cut_layers(model, stages, counts, tuple(skips), tuple(weights))


def _cut_layers(
    model: nn.Sequential,
    stages: int | None,
    counts: Sequence[int] | None,
    skips: tuple[tuple[int, int], ...],
    weights: tuple[Weight, ...],
) -> StagedModel:
    found = split_by_position(model, stages, counts, skips)
    ends = list(accumulate(found.balance))

    def recut(cuts: Sequence[int]) -> StagedModel:
        return _cut_layers(model, None, counts_of(cuts, len(weights)), skips, weights)

    return replace(found, weights=weights, cuts=tuple(ends[:-1]), recut=recut)


def _first_that_applies(ways: Mapping[str, Callable[[], StagedModel]], method: str) -> StagedModel:
    refusals: list[str] = []
    for way, cut in ways.items():
        if method in ("auto", way):
            try:
                found = cut()
            except ModelError as error:
                if method == way:
                    raise
                refusals.append(f"{way}: {error}")
            else:
                why = f" ({'; '.join(refusals)})" if refusals else ""
                return replace(found, how=found.how + why, fallback="; ".join(refusals))
    raise ModelError("the model cannot be cut as it is:\n  " + "\n  ".join(refusals))


def _graph(
    fallback: bool, model: nn.Module, stages: int | None, example: Example, balance: Balancing, split_at: Sequence[str]
) -> StagedModel:
    from penstock.model.export.cut import split_by_graph  # loads torch.export, which few models need

    if fallback and is_lazy(model):
        raise ModelError(
            "a model that was built under penstock.lazy() has no values yet, so its graph cannot be checked against "
            "it; pass cut_options=CutOptions(method='graph') to take the graph as it is"
        )
    if balance.runs or isinstance(balance.how, Mapping):
        raise ModelError("a graph has no units to measure or name; leave balance= out, or give counts")
    try:
        return split_by_graph(model, stages, example, balance.counts, split_at)
    except NotImplementedError as error:  # tensors without memory of their own, such as those inside of vmap
        raise ModelError(f"torch.export cannot capture {type(model).__name__}: {error}") from error
