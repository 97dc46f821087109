"""Schedules as values: built, drawn, proved, priced, searched for. Pure Python; never imports torch."""

from penstock.schedule.action import Action, Op, parse
from penstock.schedule.builders import FAMILIES, Family, build, family
from penstock.schedule.lowering.align import align
from penstock.schedule.lowering.lower import insert_reductions, insert_shards, insert_transfers, lower
from penstock.schedule.placement import Placement
from penstock.schedule.proof.certificate import Certificate
from penstock.schedule.proof.verify import faults, verify
from penstock.schedule.schedule import Schedule
from penstock.schedule.search import (
    CurvePoint,
    Found,
    FoundCut,
    Hosts,
    Layer,
    order_microbatches,
    search,
    search_curve,
    search_report,
    stage_costs,
)
from penstock.schedule.timing.bounds import lower_bound
from penstock.schedule.timing.costs import Costs
from penstock.schedule.timing.simulate import Spread, simulate, what_if
from penstock.schedule.timing.steady import SteadyState, steady_state
from penstock.schedule.timing.timeline import Span, Timeline
from penstock.schedule.topology import Link, Topology, links

__all__ = [
    "FAMILIES",
    "Action",
    "Certificate",
    "Costs",
    "CurvePoint",
    "Family",
    "Found",
    "FoundCut",
    "Hosts",
    "Layer",
    "Link",
    "Op",
    "Placement",
    "Schedule",
    "Span",
    "Spread",
    "SteadyState",
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
    "order_microbatches",
    "parse",
    "search",
    "search_curve",
    "search_report",
    "simulate",
    "stage_costs",
    "steady_state",
    "verify",
    "what_if",
]
