"""Schedules as values: built, drawn, proved, priced, searched for. Python and numpy; never imports torch.

What searches for schedules is a tool, which is loaded when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.schedule.action import Action, Op, parse
from penstock.schedule.builders import FAMILIES, Family, build, family
from penstock.schedule.builders.problem import stage_costs
from penstock.schedule.lowering.align import align
from penstock.schedule.lowering.lower import insert_reductions, insert_shards, insert_transfers, lower
from penstock.schedule.placement import Placement
from penstock.schedule.proof.certificate import Certificate
from penstock.schedule.proof.verify import faults, verify
from penstock.schedule.schedule import Schedule
from penstock.schedule.timing.costs import Costs
from penstock.schedule.timing.simulate import Spread, simulate, what_if
from penstock.schedule.timing.steady import SteadyState, steady_state
from penstock.schedule.timing.timeline import Span, Timeline
from penstock.schedule.topology import Link, Topology, links
from penstock.tool import tool

if TYPE_CHECKING:
    from penstock.tools.search import CurvePoint as CurvePoint
    from penstock.tools.search import Found as Found
    from penstock.tools.search import FoundCut as FoundCut
    from penstock.tools.search import Hosts as Hosts
    from penstock.tools.search import Layer as Layer
    from penstock.tools.search import lower_bound as lower_bound
    from penstock.tools.search import order_microbatches as order_microbatches
    from penstock.tools.search import search_curve as search_curve
    from penstock.tools.search import search_report as search_report
    from penstock.tools.search.search import search as search

_SEARCHED = (  # names of `penstock.tools.search`
    "CurvePoint",
    "Found",
    "FoundCut",
    "Hosts",
    "Layer",
    "lower_bound",
    "order_microbatches",
    "search",
    "search_curve",
    "search_report",
)

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


def __getattr__(name: str) -> Any:
    if name not in _SEARCHED:
        raise AttributeError(f"module 'penstock.schedule' has no attribute {name!r}")
    return getattr(tool("penstock.tools.search", f"penstock.schedule.{name}"), name)
