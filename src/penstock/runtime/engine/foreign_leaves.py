"""What a stage or a loss trains without holding it, looked for in the graphs of the first microbatches.

A forward may reach tensors that are in no module of its stage: parameters of another stage (an L2 term over
`model.parameters()`), or something in the closure of a plain loss function. In one process autograd finds them, and all
is well. On processes another stage's parameter is an old copy, whose gradient never gets home; and what belongs to no
stage is trained by this rank alone, apart from its replicas, and is in no norm and no checkpoint.

A leaf that is no `nn.Parameter` may be made by the forward itself, for a gradient inside of it. One that comes up in
two graphs is not. A loss function that names parameters which no stage holds, and has not used them yet, is looked at
in every graph, since it may begin at any time.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from penstock.errors import ModelError
from penstock.model.original.placeholders import Home
from penstock.model.staged_model import StagedModel
from penstock.runtime.backward.deferred_weights import ANCHOR
from penstock.runtime.backward.graph_leaves import leaves_in_graph
from penstock.runtime.backward.saved_graph import SavedGraph
from penstock.runtime.engine.stage import Stage
from penstock.schedule import Placement

LOOKS = 2  # graphs of each stage


def watch_leaves(
    stages: Mapping[int, Stage],
    staged: StagedModel,
    placement: Placement,
    loss_fn: Callable[..., Any] | None,
    replicated: bool,
) -> None:
    """Look at the first graphs of the stages of a process."""
    homes = {
        id(parameter): Home(holding.names.get(name, name), placement.rank_of(holding.stage), holding.stage)
        for holding in reversed(staged.holdings())
        for name, parameter in holding.module.named_parameters()
    }
    for stage in stages.values():
        # with replicas, a stage's gradients are reduced after its own last backward
        beside = () if replicated else [other for other in stages.values() if other is not stage]
        stage.inspect_graph = partial(_look, stage, beside, homes, loss_fn, replicated, {})


def _look(
    stage: Stage,
    beside: Iterable[Stage],
    homes: Mapping[int, Home],
    loss_fn: Callable[..., Any] | None,
    replicated: bool,
    seen: dict[int, Tensor],
    graph: SavedGraph,
) -> None:
    held = [parameter for each in (stage, *beside) for parameter in each.holds.parameters()]
    known = {id(leaf) for leaf in [*held, *(leaf for leaves in graph.leaves.values() for leaf in leaves), ANCHOR]}
    for leaf in leaves_in_graph(_ends(graph)):
        if id(leaf) not in known and isinstance(leaf, nn.Parameter) != (id(leaf) in seen):
            name = _name_in(loss_fn, leaf) if stage.is_last else ""
            _tell(stage, f"{name or 'a tensor'} of shape {tuple(leaf.shape)}", homes.get(id(leaf)), replicated)
        seen[id(leaf)] = leaf  # held, so that its id stays its own
    stage.graphs_inspected += 1
    if stage.graphs_inspected == LOOKS:
        later = {} if not stage.is_last else {id(leaf): name for name, leaf in _at_hand(loss_fn) if leaf.requires_grad}
        later = {key: name for key, name in later.items() if key not in homes and key not in seen}
        stage.inspect_graph = partial(_look_for, stage, later, replicated) if later else None


def _look_for(stage: Stage, later: dict[int, str], replicated: bool, graph: SavedGraph) -> None:
    for leaf in leaves_in_graph(_ends(graph)):
        if id(leaf) in later:
            _tell(stage, f"{later.pop(id(leaf))} of shape {tuple(leaf.shape)}", None, replicated)


def _ends(graph: SavedGraph) -> list[Any]:
    edges = [edge for edges in graph.roots.values() for edge in edges] + graph.extra
    return [edge.node for edge in (*edges, *([] if graph.loss is None else [graph.loss]))]


def _tell(stage: Stage, what: str, home: Home | None, replicated: bool) -> None:
    who = f"stage {stage.part.index}" + (" or its loss_fn" if stage.is_last else "")
    if home is not None:
        raise ModelError(
            f"{who} computes with {home.name}, a parameter of {home}, which it does not hold: on another rank the "
            f"value is outdated and the gradient is lost; with replicas it is reduced at the wrong time. Compute the "
            f"term in the forward of the module that has it, with penstock.add_loss(name, value); for an L2 penalty, "
            f"use the optimizer's weight_decay"
        )
    remedy = (
        "pass loss_fn= as an nn.Module that has it as a parameter, or make it a parameter of the model; if it is not "
        "to be trained, compute with it under torch.no_grad()"
    )
    if replicated:
        raise ModelError(f"{who} trains {what}, which no stage holds: each replica would train its own; {remedy}")
    warnings.warn(
        f"{who} trains {what}, which no stage holds: it gets a gradient on this rank alone, and is neither in "
        f"pipe.parameters(), in norms, nor in checkpoints; {remedy}",
        stacklevel=2,
    )


def _name_in(function: Any, leaf: Tensor) -> str:
    """The name of a variable of the function that is the tensor, or of a module that has it."""
    return next((name for name, other in _at_hand(function) if other is leaf), "")


def _at_hand(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Leaves in the variables of a function, or of modules in them."""
    if not inspect.isfunction(function):
        return
    found = inspect.getclosurevars(function)
    for name, value in {**found.globals, **found.nonlocals}.items():
        if isinstance(value, Tensor) and value.is_leaf:
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
