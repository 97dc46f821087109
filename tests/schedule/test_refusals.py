"""Arguments that cannot work are refused by name, with what would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock.errors import NotationError, ScheduleError, UsageError
from penstock.schedule import (
    Action,
    Costs,
    Layer,
    Op,
    Placement,
    Schedule,
    Topology,
    align,
    build,
    faults,
    insert_reductions,
    insert_shards,
    insert_transfers,
    lower,
    lower_bound,
    order_microbatches,
    parse,
    search_curve,
    search_report,
    simulate,
    stage_costs,
    verify,
    what_if,
)

ANY = cast(Any, None)
F = cast(Any, "F")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Action(cast(Any, 0.5), Op.F, 0), "stage must be a whole number of at least 0, got 0.5"),
        (lambda: Action(True, Op.F, 0), "stage must be a whole number of at least 0, got True"),
        (lambda: Action(0, Op.F, cast(Any, "0")), "microbatch must be a whole number"),
        (lambda: Action(0, Op.SEND_F, 0, cast(Any, 3.0)), "peer must be a whole number"),
        (lambda: Action(0, "G", 0), "'G' is not an op; ops are F, B, I, W"),
        (lambda: Action(0, cast(Any, True), 0), "True is not an op"),
        (lambda: Action.overlap(F, F), "of two Actions, got 'F'"),
        (lambda: parse(ANY), "None is not an action: expected"),
    ],
)
def test_what_is_no_action(make: Callable[[], object], why: str) -> None:
    with pytest.raises(NotationError, match=why):
        make()


def test_an_op_may_be_given_by_its_name() -> None:
    assert Action(0, "F", 0) == parse("0F0")
    assert Action(0, "SEND_F", 1, 3) == parse("0SEND_F1->3")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Schedule(cast(Any, [[0, 1]])), "row 0 holds 0; a row holds Actions or their text"),
        (lambda: Schedule("0F0 0B0"), "a list of rows, .*call Schedule.from_text"),
        (lambda: Schedule(cast(Any, {0: ["0F0"], 1: ["1F0"]})), "a schedule is a list of rows, one for each rank"),
        (lambda: Schedule(cast(Any, [5])), r"a row is a list of actions, such as \['0F0', '0B0'\]; got 5"),
        (lambda: Schedule(ANY), "a schedule is a list of rows, .* got None"),
        (lambda: Schedule.from_text(ANY), "rows of text are lines such as .* got None"),
        (lambda: Schedule.from_text(cast(Any, [1, 2])), "rows of text are lines such as .* got 1"),
        (lambda: build("1f1b", 2, 2).rank(cast(Any, "0")), "there is no rank '0': this schedule has ranks 0 to 1"),
        (lambda: build("1f1b", 2, 2).rank(cast(Any, 1.0)), "there is no rank 1.0"),
        (lambda: Placement(cast(Any, 5)), r"lists the rank of each stage, such as \[0, 1, 1, 0\]; got 5"),
        (lambda: Placement([0, 1]).rank_of(cast(Any, "0")), "there is no stage '0': stages are 0 to 1"),
        (lambda: Placement([0, 1]).stages_of(ANY), "there is no rank None: ranks are 0 to 1"),
        (
            lambda: build("1f1b", 4, 4, skips=cast(Any, 5)),
            r"pairs \(from stage, to stage\), such as \[\(0, 3\)\]; got 5",
        ),
        (lambda: build("auto", 2, 2, skips=cast(Any, 5)), "skips, are pairs"),
        (lambda: verify(cast(Any, "1f1b")), r"verify takes a Schedule, such as build\('1f1b', ranks, microbatches\)"),
        (lambda: lower(ANY), r"lower takes a Schedule, such as build\('1f1b', 4, 8\) .* got None"),
        (lambda: align(cast(Any, [])), "align takes a Schedule"),
        (lambda: simulate(cast(Any, 5)), "simulate takes a Schedule"),
        (lambda: simulate(build("1f1b", 2, 2), cast(Any, {"forward": 1})), "costs must be a Costs, such as"),
        (lambda: simulate(build("1f1b", 2, 2), jitter=cast(Any, "x")), "jitter is a relative spread .* got 'x'"),
        (lambda: what_if(build("1f1b", 2, 2), jitter=0.1, draws=cast(Any, 2.5)), "draws must be a whole number"),
        (lambda: Schedule([[parse("0F0")]], microbatches=True), "microbatches must be a whole number"),
        (lambda: Schedule([[parse("0F0")]], microbatches=cast(Any, 1.0)), "microbatches must be a whole number"),
        (lambda: Schedule([[parse("0F0")]], passes="shards"), "passes are some of reductions, shards, transfers"),
        (lambda: Schedule([[parse("0F0")]], passes=["sharding"]), "passes are some of"),
        (lambda: Schedule([[parse("0F0")]], topology=cast(Any, [(0, 1)])), "topology is a Topology, such as"),
        (lambda: build("1f1b", 4, 4, skips=cast(Any, [(0, 2.5)])), r"two whole numbers .* got \(0, 2.5\)"),
        (lambda: build("1f1b", 4, 4, skips=cast(Any, [3])), "two whole numbers"),
        (lambda: build(ANY, 4, 4), r"named by text, such as '1f1b' .*got None"),
        (lambda: Topology(cast(Any, 2.0), []), "whole numbers; got 2.0"),
        (lambda: lower(build("1f1b", 2, 2), window=True), "window must be a whole number"),
        (lambda: lower(build("1f1b", 2, 2), window=cast(Any, 1.5)), "window must be a whole number"),
        (lambda: Costs(forward=ANY), "forward takes one number or one for each stage, got None"),
        (lambda: Costs(forward=cast(Any, "1")), "forward takes one number"),
        (lambda: Costs(weight=cast(Any, [1, "2"])), "weight must be 0 or more and finite, got '2'"),
        (lambda: Costs.from_timeline(ANY), r"from_timeline takes a Timeline, of pipe.record\(\) .* got None"),
        (lambda: Costs(hop=ANY), "hop must be 0 or more and finite, got None"),
        (lambda: Costs(bytes=ANY), "bytes takes one number"),
        (lambda: Costs(bandwidth=cast(Any, "9")), "bandwidth must be above 0, got '9'"),
        (lambda: Costs(input=10**400), "input must be 0 or more and finite"),
        (lambda: simulate(build("1f1b", 2, 2), Costs(forward=1e308)), "too large to be added up"),
        (lambda: simulate(build("1f1b", 2, 2), Costs(activation=1e308)), "too large to be added up"),
        (
            lambda: search_report(2, 3, Costs(activation=1e308), effort=5),
            "may hold 3 microbatches, of up to 1e.308 each",
        ),
        (lambda: lower_bound(Placement.loop(2), 3, Costs(activation=1e308)), "give them in a larger unit"),
        (
            lambda: search_report(2, 3, Costs(links=[[0, 1], [1, 0]]), links=[[0, 2], [2, 0]]),
            "links are given twice, to search and in costs of 2 ranks; give them in one place",
        ),
        (lambda: search_report(2, 3, seconds=1, effort=5), "got seconds=1 and effort=5; give one of them"),
        (lambda: search_curve(2, 3, seconds=1, effort=5), "got seconds=1 and effort=5; give one of them"),
        (lambda: search_report(2, 4, layers=[1e308] * 4, effort=5), "layers are too large to be added up"),
        (lambda: search_report(2, 4, layers=[Layer(activation=1e308)] * 4, effort=5), "layers are too large"),
        (lambda: search_report(2, 2, Costs(sizes=[1e308] * 2), effort=5), "costs and sizes are too large"),
        (lambda: search_report(2, 4, layers=[10**400] * 4), "forward of a layer must be a number of 0 or more"),
        (lambda: search_report(2, 4, layers=[1] * 4, speeds=[10**400, 1]), "a speed is a number above 0"),
        (lambda: search_report(2, 4, memory=10**400), "memory must be a number above 0"),
        (lambda: search_report(2, 4, seconds=10**400), "seconds must be a number of 0 or more"),
        (lambda: search_report(2, 4, effort=10**400), "effort is too large to be counted"),
        (lambda: search_curve(2, 4, memory=[10**400]), "the caps of a curve are numbers above 0"),
        (lambda: order_microbatches(build("zb-v", 2, 2), [1, 2], memory=10**400), "one number above 0"),
        (lambda: Costs(bandwidth=10**400), "bandwidth must be above 0"),
        (lambda: simulate(build("1f1b", 2, 2), jitter=10**400), "jitter is a relative spread"),
        (lambda: simulate(build("1f1b", 2, 2), seed=cast(Any, float("nan"))), "seed is a whole number, such as 0"),
        (lambda: what_if(build("1f1b", 2, 2), jitter=0.1, seed=cast(Any, 0.5)), "seed is a whole number"),
        (
            lambda: simulate(build("1f1b", 2, 2), Costs(overlap={(0, 99): 1})),
            r"\(0, 99\), but there are 2 stages, 0 to 1",
        ),
        (lambda: lower_bound(Placement.loop(2), 2, cast(Any, 3)), "costs must be a Costs, such as"),
        (lambda: lower_bound(Placement.loop(2), 2, Costs(overlap={(0, 99): 1})), "there are 2 stages, 0 to 1"),
        (lambda: lower_bound(Placement.loop(2), 2, recompute=[99]), "recompute names stage 99; the stages are 0 to 1"),
    ],
)
def test_what_no_argument_can_be(make: Callable[[], object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()


@pytest.mark.parametrize(("ranks", "microbatches", "per_rank"), [(10**9, 4, 2), (4, 10**9, 2), (4, 4, 10**9)])
def test_what_would_fill_the_memory_is_refused_at_once(ranks: int, microbatches: int, per_rank: int) -> None:
    with pytest.raises(UsageError, match="computes; 200,000,000 are the most"):
        build("looped-bfs", ranks, microbatches, per_rank)
    with pytest.raises(UsageError, match="computes; 200,000,000 are the most"):
        search_report(ranks, microbatches, stages_per_rank=per_rank)


def test_costs_are_values_whatever_they_were_given_as() -> None:
    sizes, table = [1.0, 2.0], {(0, 1): 3.0}
    listed, mapped = Costs(bandwidth=1.0, bytes=sizes), Costs(bandwidth=1.0, bytes=table)
    known = {listed, mapped}
    sizes.append(3.0)
    table[0, 1] = 9.0
    assert listed == Costs(bandwidth=1.0, bytes=[1.0, 2.0]) in known
    assert mapped == Costs(bandwidth=1.0, bytes={(0, 1): 3.0}) in known
    assert mapped.wire(0, 1, (0, 1)) == (3.0, 0.0)


PASSES: dict[str, Callable[[Schedule], Schedule]] = {
    "transfers": insert_transfers,
    "reductions": insert_reductions,
    "shards": lambda schedule: insert_shards(schedule, 2),
}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        *((name, name) for name in PASSES),
        *((name, "transfers") for name in ("reductions", "shards")),
        ("shards", "reductions"),
    ],
)
def test_a_pass_never_runs_after_one_that_it_would_undo(first: str, then: str) -> None:
    once = PASSES[first](build("1f1b", 2, 2))
    for schedule in (once, once.replace(passes=())):  # by name, and by what is in the rows
        with pytest.raises(UsageError, match=rf"lowered already \({first}\).*starts from its computes"):
            PASSES[then](schedule)


def test_an_absurd_number_of_microbatches_is_one_fault() -> None:
    absurd = build("1f1b", 2, 2).replace(microbatches=10**12)
    why = "1000000000000 microbatches in 2 stages are 2000000000000 forwards, but the rows have only 12 entries"
    assert [str(fault) for fault in faults(absurd)] == [why]
    for step in (align, simulate, lower):
        with pytest.raises(ScheduleError, match=why.partition(",")[0]):
            step(absurd)


@pytest.mark.parametrize("links", [3, float("nan"), True])
def test_links_that_are_no_rows_are_refused(links: Any) -> None:
    with pytest.raises(UsageError, match="links is a square"):
        Costs(links=links)


@pytest.mark.parametrize("stages_per_rank", [0, -1, 1.5, "2"])
def test_costs_are_shared_among_a_whole_number_of_stages(stages_per_rank: Any) -> None:
    with pytest.raises(UsageError, match="stages_per_rank must be a whole number"):
        stage_costs(Costs(), stages_per_rank)


def test_a_cap_beyond_all_counting_is_no_cap() -> None:
    assert search_report(2, 4, memory=1e308, effort=20).value == search_report(2, 4, effort=20).value


@pytest.mark.parametrize("name", ["v-half", "v-min", "zb-v"])
def test_a_family_is_built_for_costs_of_nothing(name: str) -> None:
    verify(lower(build(name, 4, 8, costs=Costs(0, 0, 0))))
