"""From cuts to one graph a stage, and what crosses between them.

A value goes straight from the stage that makes it to each that reads it, in the state that it has at the end of that
stage. Memory that is written in several stages (`x += block(x)` down a trunk) goes from writer to writer: only its
first tensor crosses, from the last stage before that wrote it, the reader makes the views again, and one that writes
works on a copy of what arrived.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.model.export.capture import Capture
from penstock.model.export.operations import Values, draws


@dataclass(frozen=True)
class StageGraph:
    """What one stage runs: `function(*state, *constants, *inputs, *arrived)` -> departing values and results."""

    function: GraphModule
    state: tuple[tuple[str, tuple[Node, ...]], ...]  # the name that the capture has for it, and who reads it
    constants: tuple[Any, ...]
    inputs: tuple[int, ...]
    arrivals: dict[int, int]  # Numbers of values, by producing stage.
    departures: dict[int, int]  # The same, by consuming stage; the results of the model come last.
    home: torch.device  # The device of the capture is written into operations that make tensors.
    elsewhere: dict[torch.device, tuple[GraphModule, tuple[Any, ...]]] = field(default_factory=dict)

    def run(
        self, held: Mapping[str, Any], inputs: Sequence[Any], arrived: Mapping[Any, Sequence[Any]]
    ) -> tuple[dict[int, Any], list[Any]]:
        """Return what the stage sends, by consuming stage, and the model's results, if it has them."""
        state, given = [held[name] for name, _ in self.state], [inputs[number] for number in self.inputs]
        received = [value for source in self.arrivals for value in arrived[source]]
        here = (each.device for each in (*state, *received, *given) if isinstance(each, torch.Tensor))
        function, constants = self._on(next(here, self.home))
        found = list(function.forward(*state, *constants, *given, *received))
        sent = {}
        for target, count in self.departures.items():
            sent[target], found = found[:count], found[count:]
        return sent, found

    def _on(self, device: torch.device) -> tuple[GraphModule, tuple[Any, ...]]:
        if device == self.home:
            return self.function, self.constants
        if device not in self.elsewhere:
            function = copy.deepcopy(self.function)
            for body in function.modules():
                if isinstance(body, GraphModule):
                    for node in body.graph.nodes:
                        node.args, node.kwargs = map_aggregate(
                            (node.args, node.kwargs), lambda each: device if each == self.home else each
                        )
                    body.recompile()
            constants = pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), self.constants)
            self.elsewhere[device] = function, constants
        return self.elsewhere[device]


class _Walk:
    """Finds what a stage has to run, hold and receive for its own operations."""

    def __init__(self, values: Values, cuts: Sequence[int], stage: int) -> None:
        self.values = values
        self.cuts = cuts
        self.stage = stage
        self.end = cuts[stage] if stage < len(cuts) else len(values.nodes)
        self.runs: set[Node] = set()
        self.arrives: dict[Node, int] = {}
        self.given: set[Node] = set()  # placeholders
        self._todo: list[Node] = []
        for node in values.nodes:
            if node not in values.free and self._stage_of(node) == stage:
                self._run(node)
        if stage == len(cuts):
            for node in values.capture.results:
                if isinstance(node, Node):
                    self._demand(node)
        while self._todo:
            for needed in self._todo.pop().all_input_nodes:
                self._demand(needed)

    def _stage_of(self, node: Node) -> int:
        return bisect.bisect_right(self.cuts, self.values.position[node])

    def _run(self, node: Node) -> None:
        if node in self.runs:
            return
        self.runs.add(node)
        self._todo.append(node)
        if node in self.values.free:  # Those who write into it so far run, too.
            for group in self.values.groups[node]:
                for writer in self.values.writers.get(group, ()):
                    if self.values.position[writer] < self.end:
                        self._run(writer)

    def _demand(self, node: Node) -> None:
        values = self.values
        wandering = self._wanders(node)
        if node.op == "placeholder":
            holder = self._holder(node) if wandering else None
            if holder is None:
                self.given.add(node)
            else:
                self.arrives[node] = holder
        elif node in values.free:
            self._run(node)
        elif self._stage_of(node) == self.stage:
            return
        elif not wandering:
            self.arrives[values.same(node)] = self._stage_of(values.same(node))
        elif node in values.same_as:
            self._demand(values.same_as[node])
        elif node in [values.root(group) for group in values.groups[node]]:
            holder = self._holder(node)
            assert holder is not None
            self.arrives[node] = holder
        elif values.writes[node] or draws(node, values.capture.graph_module):
            raise ModelError(f"the graph cannot be cut here: {node.name} makes and changes memory of several stages")
        else:
            self._run(node)

    def _wanders(self, node: Node) -> bool:
        """Return whether a value's memory is written in another stage than makes it, and is no lasting state."""
        for group in self.values.groups[node] - self.values.lasting:
            root = self.values.root(group)
            writers = {self._stage_of(writer) for writer in self.values.writers.get(group, ())}
            if writers and (root.op == "placeholder" or writers != {self._stage_of(root)}):
                return root not in self.values.free
        return False

    def _holder(self, root: Node) -> int | None:
        """Return the last stage before this one that made or wrote it; None: it is an input that nobody wrote yet."""
        writers = [node for group in self.values.groups[root] for node in self.values.writers.get(group, ())]
        touched = [self._stage_of(node) for node in [root, *writers] if node.op != "placeholder"]
        return max((stage for stage in touched if stage < self.stage), default=None)

    def is_copied(self, node: Node) -> bool:
        """Return whether the stage writes into something that came from outside and is not its own."""
        groups = self.values.groups[node] - self.values.lasting
        return any(writer in self.runs for group in groups for writer in self.values.writers.get(group, ()))


def build_stages(values: Values, cuts: Sequence[int], home: torch.device) -> list[StageGraph]:
    walks = [_Walk(values, cuts, stage) for stage in range(len(cuts) + 1)]
    order = {node: place for place, node in enumerate([*values.capture.inputs, *values.nodes])}
    crossing: dict[tuple[int, int], list[Node]] = {}
    for walk in walks:
        for node, source in sorted(walk.arrives.items(), key=lambda item: order[item[0]]):
            crossing.setdefault((source, walk.stage), []).append(node)
    return [_build(walk, values.capture, crossing, home) for walk in walks]


def _build(
    walk: _Walk, capture: Capture, crossing: dict[tuple[int, int], list[Node]], home: torch.device
) -> StageGraph:
    graph = Graph()
    made: dict[Node, Node] = {}
    state = [node for node in [*capture.parameters, *capture.buffers] if node in walk.given]
    constants = [node for node in capture.constants if node in walk.given]
    inputs = [node for node in capture.inputs if node in walk.given]
    arrivals = {source: nodes for (source, target), nodes in sorted(crossing.items()) if target == walk.stage}
    for node in [*state, *constants, *inputs, *(node for nodes in arrivals.values() for node in nodes)]:
        made[node] = graph.placeholder(node.name)
    for node in list(made):
        if walk.is_copied(node):
            made[node] = graph.call_function(torch.ops.aten.clone.default, (made[node],))

    def now(node: Node) -> Node:
        while node not in made:
            node = walk.values.same_as[node]
        return made[node]

    for node in walk.values.nodes:
        if node in walk.runs:
            made[node] = graph.node_copy(node, now)
    departures = {target: nodes for (source, target), nodes in sorted(crossing.items()) if source == walk.stage}
    leaving: list[Any] = [now(node) for nodes in departures.values() for node in nodes]
    if walk.stage == len(walk.cuts):
        leaving += [now(result) if isinstance(result, Node) else result for result in capture.results]
    graph.output(leaving)
    bodies = {str(n.target): getattr(capture.graph_module, str(n.target)) for n in walk.runs if n.op == "get_attr"}
    names = {**capture.parameters, **capture.buffers}
    return StageGraph(
        GraphModule(bodies, graph),
        tuple((names[node], tuple(user for user in node.users if user in walk.runs)) for node in state),
        tuple(capture.constants[node] for node in constants),
        tuple(capture.inputs[node] for node in inputs),
        {source: len(nodes) for source, nodes in arrivals.items()},
        {target: len(nodes) for target, nodes in departures.items()},
        home,
    )
