"""Where a graph is cut: between which operations, so that the heaviest stage is light and little crosses.

A *piece* is an operation with parameters of its own and what follows until the next one. Stages are whole pieces; in
the gap before a piece the cut stands where the fewest bytes cross. A cut is named by the first parameter that the new
stage uses, or by a module, so that the same cut can be found in another capture of the model.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from penstock.errors import ModelError
from penstock.model.balance.partition import bytes_across, counts_between, partition
from penstock.model.balance.request import first_pieces
from penstock.model.export.capture import PREFIX
from penstock.model.export.operations import Values, size_in_bytes
from penstock.model.names import name_and_use, similar_names

NEARLY = 1.1  # a cut where less crosses is taken if the heaviest stage grows by no more than this


class GraphCut(NamedTuple):
    """A stage begins with the first use of a parameter, or with a module's first operation; or with a later one."""

    kind: str  # "parameter" or "module"
    name: str
    use: int = 1


@dataclass(frozen=True)
class _Piece:
    position: int  # The operation that first uses the parameters.
    parameter: str
    weight: float
    cut: int | None  # The cut before it; None: nowhere.
    crossing: float


def choose_cuts(
    values: Values,
    tensors: dict[str, Tensor],
    stages: int,
    balance: str | Sequence[int] | None,
    split_at: Sequence[str],
) -> list[GraphCut]:
    if split_at:
        named = map(name_and_use, split_at)
        return [GraphCut("parameter" if name in tensors else "module", name, use) for name, use in named]
    pieces = _pieces(values, tensors)
    if isinstance(balance, str) and balance != "parameters":
        raise ModelError(f"balance={balance!r} is not known where a model is cut by graph; pass 'parameters' or counts")
    if balance is not None and not isinstance(balance, str):
        has = f"its graph {len(pieces)} operations with parameters of their own"
        starts = first_pieces(balance, stages, len(pieces), has)
        return [GraphCut("parameter", pieces[number].parameter) for number in starts]
    weights = [piece.weight for piece in pieces]
    crossing = [*(piece.crossing for piece in pieces), 0.0]
    allowed = [number for number, piece in enumerate(pieces) if number and piece.cut is not None]
    if len(allowed) + 1 < stages:
        raise ModelError(
            f"the model's graph has {len(allowed)} places to cut between its {len(pieces)} operations with parameters, "
            f"too few for {stages} stages; pass stages={len(allowed) + 1} or fewer"
        )
    best = partition(weights, stages, allowed=allowed, crossing=crossing)
    thin = [n for n in allowed if crossing[n] <= min(crossing[m] for m in allowed if abs(m - n) <= 1)]
    if len(thin) + 1 >= stages:
        calm = partition(weights, stages, allowed=thin, crossing=crossing)
        if calm.largest <= NEARLY * best.largest:
            best = calm
    return [GraphCut("parameter", pieces[number].parameter) for number in best.cuts]


def find_cuts(values: Values, tensors: dict[str, Tensor], cuts: Sequence[GraphCut]) -> list[int]:
    """Return the positions of the cuts in this capture: the first operations of stages 1, 2, ..."""
    pieces = {piece.parameter: piece for piece in _pieces(values, tensors)}
    taken = _inseparable(values)
    places = []
    for cut in cuts:
        place = _module_start(values, cut.name, cut.use) if cut.kind == "module" else None
        if cut.kind == "parameter" and cut.use > 1:
            place = _later_use(values, tensors, cut)
        elif cut.kind == "parameter" and cut.name in pieces:
            place = pieces[cut.name].cut
        if place is None or place in taken:
            raise ModelError(
                f"the graph cannot be cut before {cut.name}: it is not used there in this mode, or a buffer that "
                f"operations on both sides change would be on two stages; cut elsewhere with split_at="
            )
        places.append(place)
    if places != sorted(set(places)) or 0 in places:
        raise ModelError(
            f"the cuts {', '.join(cut.name for cut in cuts)} are not in the order in which the model uses them, or one "
            f"leaves a stage with nothing to do"
        )
    return places


def count_pieces(values: Values, tensors: dict[str, Tensor], cuts: Sequence[GraphCut]) -> tuple[int, ...]:
    return counts_between(find_cuts(values, tensors, cuts), [piece.position for piece in _pieces(values, tensors)])


def _later_use(values: Values, tensors: dict[str, Tensor], cut: GraphCut) -> int | None:
    parameters, tensor = values.capture.parameters, tensors[cut.name]
    uses = [
        place
        for place, node in enumerate(values.nodes)
        if any(read in parameters and tensors[parameters[read]] is tensor for read in node.all_input_nodes)
    ]
    return uses[cut.use - 1] if len(uses) >= cut.use else None


def _module_start(values: Values, name: str, use: int) -> int:
    known: dict[str, None] = {}
    calls: dict[str, None] = {}
    for place, node in enumerate(values.nodes):
        for module, call in _calls_of(node):
            known[module] = None
            if module == name and node not in values.free:
                calls[call] = None
                if len(calls) == use:
                    return place
    if calls:
        raise ModelError(f"split_at: {name}#{use} is not a place to cut: the model calls {name!r} {len(calls)} times")
    hint = similar_names(name, filter(None, known), "modules")
    raise ModelError(f"split_at: no module {name!r} computes anything in the model's forward{hint}")


def modules_of(node: Node) -> list[str]:
    """Return the names of the modules in whose forward the operation stands, outermost first."""
    return [module for module, _ in _calls_of(node)]


def _calls_of(node: Node) -> list[tuple[str, str]]:
    """Return these modules with a key for the call of each, which the capture numbers."""
    stack = node.meta.get("nn_module_stack") or {}
    named = [(path.partition("@")[0], call) for call, (path, _) in stack.items()]
    return [(path.removeprefix(PREFIX), call) for path, call in named if path.startswith(PREFIX)]


def _pieces(values: Values, tensors: dict[str, Tensor]) -> list[_Piece]:
    seen: set[int] = set()
    starts: list[tuple[int, str, float]] = []
    parameters = values.capture.parameters
    for place, node in enumerate(values.nodes):
        fresh = {
            id(tensors[parameters[a]]): parameters[a]
            for a in node.all_input_nodes
            if a in parameters and id(tensors[parameters[a]]) not in seen
        }
        seen.update(fresh)
        if fresh:
            weight = float(sum(tensors[name].numel() for name in fresh.values()))
            starts.append((place, next(iter(fresh.values())), weight))
    crossing, taken = _crossing(values), _inseparable(values)
    pieces, before = [], -1
    for place, name, weight in starts:
        gap = [cut for cut in range(place, max(before, 0), -1) if cut not in taken]
        best = min(gap, key=lambda cut: crossing[cut]) if gap else None
        pieces.append(_Piece(place, name, weight, best, 0.0 if best is None else crossing[best]))
        before = place
    return pieces


def _crossing(values: Values) -> list[float]:
    end = len(values.nodes)
    results = {result for result in values.capture.results if isinstance(result, Node)}
    spans: dict[Node, tuple[int, int]] = {}
    for node in values.nodes:
        if node in values.free:
            continue
        maker = values.same(node)
        last = max((values.position.get(user, end) for user in node.users), default=values.position[node])
        last = end if node in results else last
        first, known = spans.get(maker, (values.position.get(maker, 0), 0))
        spans[maker] = first, max(known, last)
    made = ((*span, size_in_bytes(node)) for node, span in spans.items() if node.op != "placeholder")
    return bytes_across(made, end)


def _inseparable(values: Values) -> set[int]:
    """Find where no cut may stand: before one of several results, or amid the uses of a buffer that changes."""
    taken = {place for place, node in enumerate(values.nodes) if node.target is operator.getitem}
    for group, writers in values.writers.items():
        if group not in values.lasting:
            continue
        uses = {values.position[node] for node in writers}
        for member in values.members[group]:
            uses |= {values.position[user] for user in member.users if user in values.position}
        taken.update(range(min(uses) + 1, max(uses) + 1))
    return taken
