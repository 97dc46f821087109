"""The best schedule under costs and a memory cap, found and not chosen.

request    what is asked for, checked; `found` is what comes back
problem    one placement, its costs and caps, as flat arrays of numbers
orders/    what an order costs, and ways to make and change orders
hunt       the search on one placement; `effort` shares a `budget` between all of them
space      the placements, and the stages that recompute, to search over
search     all placements, within a time
curve      the search at one memory cap after the other
tuned      one family's order for given costs
steady_bound  the least period of steps that overlap
unsplit    families with full backwards, where halves cost memory
uneven/    layers, ranks, links and microbatches that differ
"""

from penstock.schedule.search.curve import CurvePoint, search_curve
from penstock.schedule.search.found import Found, Tried
from penstock.schedule.search.problem import stage_costs
from penstock.schedule.search.search import search, search_report
from penstock.schedule.search.uneven.entry import FoundCut
from penstock.schedule.search.uneven.layers import Hosts, Layer
from penstock.schedule.search.uneven.microbatches import order_microbatches

__all__ = [
    "CurvePoint",
    "Found",
    "FoundCut",
    "Hosts",
    "Layer",
    "Tried",
    "order_microbatches",
    "search",
    "search_curve",
    "search_report",
    "stage_costs",
]
