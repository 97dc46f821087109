"""What the operations of a graph do to their tensors: share memory, write in place, draw, or only look at inputs.

A captured graph is not functional: `relu_` writes into its argument and a view shares its base's memory. To cut it
anywhere one has to know which values are one memory (a *group*), who writes into it, and which operations are *free*:
they depend on inputs, constants and unchanging buffers alone and draw nothing (masks, positions, sizes), so that each
stage can make them for itself and nothing needs to cross.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from penstock.errors import ModelError
from penstock.model.export.capture import Capture

HIDDEN_WRITES = ("running_mean", "running_var")  # batch_norm changes them, which its schema does not say


class Values:
    """What each operation of a capture reads, writes and shares memory with."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.nodes = capture.nodes
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.groups: dict[Node, frozenset[int]] = {}
        self.members: dict[int, list[Node]] = {}
        state = [*capture.parameters, *capture.buffers, *capture.constants]
        for node in [*state, *capture.inputs, *self.nodes]:
            self.groups[node] = _storages(node)
            for group in self.groups[node]:
                self.members.setdefault(group, []).append(node)
        self.writes: dict[Node, frozenset[int]] = {
            node: frozenset().union(*map(self.groups.__getitem__, _written_arguments(node, capture.graph_module)))
            for node in self.nodes
        }
        self.writers: dict[int, list[Node]] = {}
        for node, groups in self.writes.items():
            for group in groups:
                self.writers.setdefault(group, []).append(node)
        self._check_constants()
        self.same_as = {node: source for node in self.nodes if (source := _in_place_of(node)) is not None}
        self.lasting = frozenset(
            group for node in state for group in self.groups[node]
        )  # Memory that outlives a forward.
        self.free = self._free()

    def root(self, group: int) -> Node:
        """Return the first tensor that has this memory: all others are views of it."""
        return next(node for node in self.members[group] if isinstance(node.meta.get("val"), Tensor))

    def same(self, node: Node) -> Node:
        """Return the tensor itself, where `node` is the result of writing into it."""
        while node in self.same_as:
            node = self.same_as[node]
        return node

    def _check_constants(self) -> None:
        """Refuse a tensor that is written to and no buffer: in a graph it would be a constant."""
        for node, name in self.capture.constant_names.items():
            if any(group in self.writers for group in self.groups[node]):
                raise ModelError(
                    f"the model's forward writes into self.{name}, which is a tensor but no buffer: in a captured "
                    f"graph it would be a constant. Make it a registered buffer, or pass a list of stage modules"
                )

    def _free(self) -> set[Node]:
        given = {*self.capture.inputs, *self.capture.constants, *self.capture.buffers}
        spoiled = {g for node in [*given, *self.capture.parameters] for g in self.groups[node] if g in self.writers}
        while True:
            free: set[Node] = set()
            for node in self.nodes:
                fixed = node.op == "get_attr" or (node.users and not draws(node, self.capture.graph_module))
                if fixed and not self.groups[node] & spoiled and not self.writes[node] & spoiled:
                    if all((a in free or a in given) and not self.groups[a] & spoiled for a in node.all_input_nodes):
                        free.add(node)
                elif self._only_writes(node) and all(a in free for a in node.all_input_nodes):
                    free.add(node)
            more = {group for node in self.nodes if node not in free for group in self.writes[node]} - spoiled
            if not more:
                return free
            spoiled |= more

    def _only_writes(self, node: Node) -> bool:
        return not node.users and bool(self.writes[node]) and not draws(node, self.capture.graph_module)


def _tensors(node: Node) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def _storages(node: Node) -> frozenset[int]:
    return frozenset(value.untyped_storage()._cdata for value in _tensors(node))


def _in_place_of(node: Node) -> Node | None:
    """Return the argument that the node returns after writing into it."""
    if not isinstance(node.target, OpOverload) or len(node.target._schema.returns) != 1:
        return None
    returned = node.target._schema.returns[0].alias_info
    if returned is None or not returned.is_write:
        return None
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == returned.before_set:
            value = _argument(node, place, argument.name)
            return value if isinstance(value, Node) else None
    return None


def _argument(node: Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _nodes_in(value: Any) -> list[Node]:
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Node)]


def _written_arguments(node: Node, module: GraphModule) -> list[Node]:
    if isinstance(node.target, OpOverload):
        return [
            found
            for place, argument in enumerate(node.target._schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in HIDDEN_WRITES
            for found in _nodes_in(_argument(node, place, argument.name))
        ]
    if isinstance(node.target, HigherOrderOperator):
        operands = [found for found in _nodes_in(node.args) if found.op != "get_attr"]
        written: list[Node] = []
        for body in _bodies(node, module):
            inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
            places = [place for place, inner in enumerate(inputs) if _is_written(inner, body)]
            # The body's inputs may not simply be the operands: then any of them may be meant.
            if places:
                written += [operands[place] for place in places] if len(inputs) == len(operands) else operands
        return written
    return []


def _is_written(placeholder: Node, body: GraphModule) -> bool:
    mine = _storages(placeholder)
    return any(
        mine & _storages(written)
        for node in body.graph.nodes
        if node.op == "call_function"
        for written in _written_arguments(node, body)
    )


def _bodies(node: Node, module: GraphModule) -> list[GraphModule]:
    found = [getattr(module, str(part.target)) for part in _nodes_in(node.args) if part.op == "get_attr"]
    return [body for body in found if isinstance(body, GraphModule)]


def draws(node: Node, module: GraphModule) -> bool:
    if isinstance(node.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    if isinstance(node.target, HigherOrderOperator):
        return any(draws(inner, body) for body in _bodies(node, module) for inner in body.graph.nodes)
    return node.op == "call_function" and not _is_arithmetic(node)


def _is_arithmetic(node: Node) -> bool:
    """Recognise Python's own functions on sizes, and torch's symbolic ones."""
    return node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "math", "torch")


def size_in_bytes(node: Node) -> float:
    def length(size: Any) -> float:
        return float(size if isinstance(size, int) else size.node.hint or 1)

    return sum(value.dtype.itemsize * math.prod(map(length, value.shape)) for value in _tensors(node))
