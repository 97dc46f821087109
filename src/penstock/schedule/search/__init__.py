"""The best schedule under costs and a memory cap, found and not chosen.

problem    one placement, its costs and caps, as flat arrays of numbers
evaluate   what an order costs, with its weight gradients filled in
dispatch   orders made by rules
improve    small changes to an order
hunt       the search on one placement
search     all placements, within a time
uneven/    layers, ranks, links and microbatches that differ

"""

from penstock.schedule.search.problem import stage_costs
from penstock.schedule.search.search import Found, Tried, search, search_report
from penstock.schedule.search.uneven.entry import FoundCut
from penstock.schedule.search.uneven.layers import Hosts, Layer
from penstock.schedule.search.uneven.microbatches import order_microbatches

__all__ = [
    "Found",
    "FoundCut",
    "Hosts",
    "Layer",
    "Tried",
    "order_microbatches",
    "search",
    "search_report",
    "stage_costs",
]
