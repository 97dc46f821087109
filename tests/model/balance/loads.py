"""What a cut leaves on the ranks, computed from the definition."""

from __future__ import annotations


def loads_of(weights, cuts, placement, speeds):
    """By rank: what its stages weigh, divided by its speed."""
    bounds = [0, *cuts, len(weights)]
    loads = [0.0] * placement.ranks
    for stage, rank in enumerate(placement):
        loads[rank] += sum(weights[bounds[stage] : bounds[stage + 1]]) / speeds[rank]
    return loads
