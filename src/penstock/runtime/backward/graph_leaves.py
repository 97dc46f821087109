"""The leaves of a graph of autograd's: a walk over it in Python, for what is asked once and not per microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_LEAF: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def uses_in_graph(outputs: Sequence[Tensor]) -> Counter[int]:
    """Count how often each leaf is used in the graph behind `outputs`, by the leaf's id."""
    uses = Counter(id(output) for output in outputs if output.grad_fn is None)
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None:
                continue
            if isinstance(node, _LEAF):
                uses[id(node.variable)] += 1
            elif node not in seen:
                seen.add(node)
                nodes.append(node)
    return uses


def leaves_in_graph(nodes: Iterable[Any], known: Iterable[Tensor] = ()) -> Iterator[Tensor]:
    """Yield all leaves in the graph behind some nodes, but for what is behind tensors that are known."""
    waiting = list(nodes)
    seen = {*waiting, *(tensor.grad_fn for tensor in known)}
    while waiting:
        node = waiting.pop()
        if isinstance(node, _LEAF):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
