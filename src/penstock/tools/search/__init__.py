"""The best schedule under costs and a memory cap, found and not chosen.

request    what is asked for, checked; `found` is what comes back
orders/    what an order costs, and ways to make and change orders
hunt       the search on one placement; `effort` shares a `budget` between all of them
space      the placements, and the stages that recompute, to search over
search     all placements, within a time
curve      the search at one memory cap after the other
tuned      one family's order for given costs
steady_bound  the least period of steps that overlap
unsplit    families with full backwards, where halves cost memory
uneven/    layers, ranks, links and microbatches that differ
bounds/    times that no order can beat
calibrate  costs from a run

What a search works on is with the builders, which share it: `problem`, one placement as flat arrays of numbers, and
`rhythm` on the clock of `clocked`.
"""

from penstock.tools.search.bounds.lower_bound import lower_bound
from penstock.tools.search.curve import CurvePoint, search_curve
from penstock.tools.search.found import Found, Tried
from penstock.tools.search.request import memory_of_1f1b
from penstock.tools.search.search import search, search_report
from penstock.tools.search.uneven.entry import FoundCut
from penstock.tools.search.uneven.layers import Hosts, Layer
from penstock.tools.search.uneven.microbatches import order_microbatches

__all__ = [
    "CurvePoint",
    "Found",
    "FoundCut",
    "Hosts",
    "Layer",
    "Tried",
    "lower_bound",
    "memory_of_1f1b",
    "order_microbatches",
    "search",
    "search_curve",
    "search_report",
]
