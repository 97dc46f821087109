"""The best schedule under costs and a memory cap, found and not chosen.

request            what is asked for, checked; `found` is what comes back
rules              priority rules, beside `rhythm` in `schedule/builders/`; `portfolio`: which are tried, and drawn
placement_search   the search on one placement: builders, rules, and `neighbours` of the best orders
explore            how placements share a `budget`
search             all `placements`, and a builder's order for costs; `curve`: at one memory cap after the other
cut_search         the same for `layers` that are still to be cut: `rows` of ranks, and `cutting` for them
microbatches       a schedule made anew for microbatches that differ
bounds/            times that no order can beat
calibrate          costs from a run

What a search works on is in `schedule/builders/`: `problem`, one placement as flat arrays of numbers; `dispatch`, which
makes an order by a rule; and `filling`, which prices it.
"""

from penstock.tools.search.bounds.lower_bound import lower_bound
from penstock.tools.search.curve import CurvePoint, search_curve
from penstock.tools.search.cut_search import FoundCut
from penstock.tools.search.found import Found, Tried
from penstock.tools.search.layers import Hosts, Layer
from penstock.tools.search.microbatches import order_microbatches
from penstock.tools.search.request import memory_of_1f1b
from penstock.tools.search.search import search, search_report

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
