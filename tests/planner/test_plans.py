"""Plans as values, as tables and as documents."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from planner_cases import SMALL, plans

from penstock.errors import UsageError
from penstock.planner.plans import LISTED, Plans, plan_document, plans_document, plans_text


def test_a_model_that_fits_nowhere_says_so() -> None:
    with pytest.raises(UsageError, match="no layout of 8 devices can train this model"):
        _ = plans(replace(SMALL, device=replace(SMALL.device, memory=1.5e8))).best


@cache
def found() -> Plans:
    return plans()


def test_the_figures_of_a_plan_are_those_of_its_fullest_process_and_of_all_ranks_where_they_are_threads() -> None:
    plan = found().best
    assert plan.figures["step"] == plan.seconds
    assert plan.figures["makespan"] == pytest.approx(plan.seconds - plan.shares["reduction"] - plan.shares["update"])
    assert plan.figures["process"] == plan.peak.process == max(each.process for each in plan.memory)
    threads = replace(plan, config=replace(plan.config, pipeline=replace(plan.config.pipeline, workers="threads")))
    assert threads.figures["process"] == pytest.approx(sum(each.process for each in plan.memory))


def test_a_pipeline_is_cut_by_counts_where_the_model_is_a_sequence_and_else_by_names() -> None:
    plan = found().best
    assert plan.pipeline_arguments()["balance"] == list(plan.counts)
    named = replace(plan, by_position=False).pipeline_arguments()
    assert named["split_at"] == list(plan.cuts)
    assert "balance" not in named
    assert named["recompute"] == ("always" if plan.recompute else "never")
    assert named["schedule"] is named["schedule"]


def test_a_table_has_a_line_for_each_plan_and_some_of_what_was_left_out() -> None:
    text = plans_text(found())
    for plan in found().ranked:
        assert text.count(f" {plan.layout} ") >= 1
    assert f"left out, {len(found().rejected)} layouts:" in text
    assert "more (--json lists all)" not in text
    many = plans_text(replace(found(), rejected=found().rejected[:1] * (LISTED + 3)))
    assert many.count(f"  {found().rejected[0].layout}: {found().rejected[0].why}\n") == LISTED
    assert many.endswith("and 3 more (--json lists all)")
    assert text.startswith("38.92 million parameters on 2 x 4 devices (cluster), 10 GB each, of which 10% stay free")


def test_a_document_holds_all_that_was_found() -> None:
    document = json.loads(json.dumps(plans_document(found())))
    assert len(document["plans"]) == len(found().ranked)
    assert len(document["rejected"]) == len(found().rejected)
    best = json.loads(json.dumps(plan_document(found().best)))
    assert document["plans"][0] == best
    assert (best["schedule"], best["counts"]) == (found().best.family, list(found().best.counts))
    assert sum(best["shares"].values()) == pytest.approx(found().best.seconds, rel=1e-2)


def test_where_nothing_fits_the_table_says_what_would_help() -> None:
    none = replace(found(), ranked=())
    assert "what helps: more devices, or more memory on each (device.memory)" in plans_text(none)
