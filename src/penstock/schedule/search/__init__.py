"""The best schedule under costs and a memory cap, found and not chosen.

problem    one placement, its costs and caps, as flat arrays of numbers
evaluate   what an order costs, with its weight gradients filled in
dispatch   orders made by rules
grouped    orders on a loop that go by groups of microbatches
rhythm     orders on a V that keep to a rhythm; both run on the clock of `clocked`
recipes    rules, groupings and rhythms as values to begin with, draw and change
improve    small changes to an order
hunt       the search on one placement
search     all placements, within a time
curve      the search at one memory cap after the other
tuned      one family's order for given costs
uneven/    layers, ranks, links and microbatches that differ

"""

from penstock.schedule.search.curve import CurvePoint, search_curve
from penstock.schedule.search.problem import stage_costs
from penstock.schedule.search.search import Found, Tried, search, search_report
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
