"""The names that users may rely on: to change these lists is to change the interface, and belongs in the changelog."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock
import penstock.schedule

PENSTOCK = [
    "BatchOptions",
    "Checkpointer",
    "CutOptions",
    "GPipe",
    "GradScaler",
    "Loaded",
    "LossOptions",
    "Microbatches",
    "ParallelOptions",
    "Pipeline",
    "PretrainedFolder",
    "ReplicaSampler",
    "Routed",
    "Shared",
    "StepResult",
    "TensorPlan",
    "__version__",
    "add_loss",
    "by_tokens",
    "current_microbatch",
    "defer_batch_norm",
    "exact_batch_norm",
    "is_checkpointing",
    "is_recomputing",
    "lazy",
    "load",
    "mesh",
    "parameter_groups",
    "parity",
    "plan",
    "randomness",
    "rehearse",
    "rehearse_training",
    "restore_batch_norm",
    "save",
]
SCHEDULE = [
    "Action",
    "Certificate",
    "Costs",
    "CurvePoint",
    "FAMILIES",
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


@pytest.mark.parametrize(("module", "names"), [(penstock, PENSTOCK), (penstock.schedule, SCHEDULE)])
def test_these_names_are_public_and_no_others(module: object, names: list[str]) -> None:
    assert sorted(module.__all__) == sorted(names)
    for name in names:
        assert getattr(module, name) is not None


def test_type_checkers_see_the_same_names_in_the_same_modules() -> None:
    tree = ast.parse(Path(penstock.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == penstock._HOMES
