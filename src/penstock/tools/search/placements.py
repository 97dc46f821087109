"""What there is to search over: placements, and which stages recompute, as far as memory allows any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import UsageError
from penstock.schedule.builders.problem import SHARED, Problem, stage_costs
from penstock.schedule.placement import Placement
from penstock.tools.search.bounds.lower_bound import NoRoom
from penstock.tools.search.request import PLACEMENTS, Request

LONGEST_V = 4  # stages per rank of a V, unless others are asked for: with more, a loop was ahead wherever tried


def placements_for(request: Request) -> list[tuple[str, Placement]]:
    """Return each placement that the costs are for once, fewest stages first."""
    ranks, costs, sizes = request.ranks, request.priced, sorted(set(request.sizes))
    given: dict[str, int] = {}  # For how many stages each is.
    for name in (*SHARED, "bytes", "overlap"):
        value = getattr(costs, name)
        if isinstance(value, Mapping):  # bytes have an edge for each pair of neighbours, up to the last stage
            if value or name == "bytes":  # an overlap that names no pair is for any number
                given[name] = 1 + max((max(pair) for pair in value), default=0)
        elif isinstance(value, Sequence):
            given[name] = len(value)
    fitting = [size for size in sizes if {*given.values()} <= {ranks * size}]
    if not fitting:
        raise UsageError(
            f"{' and '.join(f'{name} is for {count} stages' for name, count in given.items())}, but {ranks} ranks with "
            f"{' or '.join(map(str, sizes))} stages each have "
            f"{' or '.join(str(ranks * size) for size in sizes)}; give one number for a whole rank, "
            "or costs for that many stages"
        )
    found: dict[Placement, str] = {}
    for size in fitting:
        for kind in request.kinds:
            if kind == "v" and request.stages_per_rank is None and size > LONGEST_V:
                continue
            found.setdefault(PLACEMENTS[kind](ranks, size), kind)
    return [(kind, placement) for placement, kind in found.items()]


def problems_for(request: Request) -> list[tuple[str, Problem]]:
    """Return one for each placement and choice of stages to recompute."""
    found = []
    for kind, placement in placements_for(request):
        each = stage_costs(request.priced, placement.stages_per_rank)
        for again in recompute_choices(request, placement):
            options: dict[str, Any] = {"objective": request.objective, "recompute": again}
            found.append((kind, Problem(placement, request.microbatches, each, request.caps, **options)))
    return found


def no_room(problems: Sequence[Problem], request: Request) -> NoRoom:
    """Return the error for a request of whose problems none has an order."""
    remedy = (
        f"give at least that much{'' if request.recompute else ', recompute=True,'} or cut the model for more ranks"
    )
    lacking = min(problems, key=lambda problem: problem.lack)
    if not lacking.lack:
        fact = f"no order was found in memory {min(request.caps):g}, though each microbatch alone has room"
        return NoRoom(fact, remedy.replace("at least that much", "more"))
    rank = max(range(request.ranks), key=lambda rank: lacking.least_memory(rank) - lacking.caps[rank])
    which = "one microbatch" if lacking.alike else "the largest microbatch"
    return NoRoom(
        f"memory {request.caps[rank]:g} is too little for rank {rank}: "
        f"{which} alone holds {lacking.least_memory(rank):g} there",
        remedy,
    )


def recompute_choices(request: Request, placement: Placement) -> list[frozenset[int]]:
    """Choose stages to recompute: none; those of the first ranks or the first of each, which wait longest; all."""
    if not request.may_recompute:
        return [frozenset()]
    ranks, size = placement.ranks, placement.stages_per_rank
    owned = [placement.stages_of(rank) for rank in range(ranks)]
    first_ranks = [owned[: ranks * quarters // 4] for quarters in (1, 2, 3)]
    first_of_each = [[stages[:count] for stages in owned] for count in range(1, size)]
    sets = [frozenset(stage for stages in chosen for stage in stages) for chosen in [*first_ranks, *first_of_each]]
    return list(dict.fromkeys([frozenset[int](), *sets, frozenset(range(placement.stages))]))
