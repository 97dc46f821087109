"""Schedules as values: built, drawn, proved, priced, searched for. Pure Python; never imports torch."""

from penstock.schedule.action import Action, Op, parse
from penstock.schedule.align import align
from penstock.schedule.bounds import lower_bound
from penstock.schedule.builders import FAMILIES, Family, build, family
from penstock.schedule.costs import Costs
from penstock.schedule.lower import insert_reductions, insert_shards, insert_transfers, lower
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule
from penstock.schedule.search import Found, search, search_report, stage_costs
from penstock.schedule.simulate import Spread, simulate, what_if
from penstock.schedule.timeline import Span, Timeline
from penstock.schedule.topology import Link, Topology, links
from penstock.schedule.verify import faults, verify

__all__ = [
    "FAMILIES",
    "Action",
    "Costs",
    "Family",
    "Found",
    "Link",
    "Op",
    "Placement",
    "Schedule",
    "Span",
    "Spread",
    "Timeline",
    "Topology",
    "align",
    "build",
    "family",
    "faults",
    "insert_reductions",
    "insert_shards",
    "insert_transfers",
    "links",
    "lower",
    "lower_bound",
    "parse",
    "search",
    "search_report",
    "simulate",
    "stage_costs",
    "verify",
    "what_if",
]
