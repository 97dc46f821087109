"""The best schedule under costs and a memory cap, found and not chosen.

problem    one placement, its costs and caps, as flat arrays of numbers
evaluate   what an order costs, with its weight gradients filled in
dispatch   orders made by rules
improve    small changes to an order
hunt       the search on one placement
search     all placements, within a time

"""

from penstock.schedule.search.problem import stage_costs
from penstock.schedule.search.search import Found, Tried, search, search_report

__all__ = ["Found", "Tried", "search", "search_report", "stage_costs"]
