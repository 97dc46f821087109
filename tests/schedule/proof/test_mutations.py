"""Every small change that alters what a schedule computes is refused; every harmless one is not."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product

import pytest
from schedule.proof.mutants import KINDS, mutants
from schedule.proof.reference_executor import still_right
from tiers import in_tiers, tiers

from penstock.schedule import FAMILIES, Schedule, build, faults, lower, verify
from penstock.schedule.files.text import from_csv, rows_to_csv


def stage_counts(name: str, most: int) -> range:
    return range(2, 3) if FAMILIES[name].layout == "v" else range(1, most + 1)


def programs(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Schedule]:
    schedule = build(name, ranks, microbatches, stages_per_rank)
    yield schedule
    yield lower(schedule)
    yield lower(schedule, reduce=True, window=2)


def check(schedule: Schedule, seed: str, per_kind: int | None) -> Counter[tuple[str, bool]]:
    """Verify and the reference executor agree on each mutant; a refusal says where."""
    seen: Counter[tuple[str, bool]] = Counter()
    for mutant in mutants(schedule, random.Random(seed), per_kind):
        found, right = faults(mutant.schedule), still_right(mutant.schedule)
        assert (not found) == right, f"{mutant}\n{found}"
        if found:
            assert any(fault.rank is not None and fault.action is not None for fault in found), f"{mutant}\n{found}"
        seen[mutant.kind, right] += 1
    return seen


@pytest.mark.parametrize(
    ("name", "per_kind"),
    in_tiers(
        [(name, per_kind) for name in FAMILIES for per_kind in (2, 6)],
        [("1f1b", 2), ("zb-v", 2)],
        [(name, 6) for name in FAMILIES],
    ),
)
def test_verify_refuses_exactly_the_mutants_that_compute_something_else(name: str, per_kind: int) -> None:
    seen: Counter[tuple[str, bool]] = Counter()
    for ranks, microbatches in ((1, 2), (2, 1), (2, 3), (3, 2), (3, 5), (4, 4)):
        for stages_per_rank in stage_counts(name, 2):
            for program in programs(name, ranks, microbatches, stages_per_rank):
                assert still_right(program)
                seen += check(program, f"{name} {ranks} {microbatches} {stages_per_rank}", per_kind)
    assert all(seen[kind, False] for kind in KINDS), seen
    assert seen["swap", True], seen  # some orders do not matter: refusing them all would be no proof


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_every_lost_or_doubled_action_of_a_small_program_is_refused_and_named(name: str) -> None:
    program = lower(build(name, 2, 2), reduce=True, window=1)
    for mutant in mutants(program, random.Random(name), per_kind=None):
        if mutant.kind in ("delete", "duplicate"):
            parts = {mutant.action, *mutant.action.parts()}
            named = [fault for fault in faults(mutant.schedule) if fault.rank is not None and fault.action is not None]
            near = [
                fault
                for fault in named
                if fault.action in parts
                or any(str(part) in fault.message for part in parts)
                or fault.rank == mutant.rank
            ]
            assert near, mutant


@pytest.mark.slow
def test_programs_with_skip_edges_are_judged_like_any_other() -> None:
    seen: Counter[tuple[str, bool]] = Counter()
    for name, stages_per_rank in (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("gpipe", 2)):
        for microbatches in (1, 3):
            stages = 3 * stages_per_rank
            schedule = build(name, 3, microbatches, stages_per_rank, skips=[(0, stages - 1), (0, 2), (1, stages - 1)])
            for program in (schedule, lower(schedule), lower(schedule, reduce=True, window=2)):
                assert still_right(program)
                seen += check(program, f"skips {name} {microbatches}", per_kind=4)
    assert all(seen[kind, False] for kind in KINDS), seen


@pytest.mark.parametrize("name", FAMILIES)
def test_mutants_that_went_through_a_csv_file_are_judged_the_same(name: str) -> None:
    program = lower(build(name, 3, 3), reduce=True, window=2)
    facts = {
        "placement": program.placement,
        "microbatches": program.microbatches,
        "topology": program.topology,
        "forward_only": program.forward_only,
        "passes": program.passes,
    }
    for mutant in mutants(program, random.Random(name), per_kind=3):
        loaded = from_csv(rows_to_csv(mutant.schedule.rows), dict(facts))
        assert loaded == mutant.schedule
        assert (not faults(loaded)) == still_right(mutant.schedule), mutant


@pytest.mark.parametrize("stride", tiers(59, 1))
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_up_to_4_ranks_6_microbatches_3_stages(name: str, stride: int) -> None:
    sizes = product(range(1, 5), range(1, 7), stage_counts(name, 3))
    for ranks, microbatches, stages_per_rank in islice(sizes, 0, None, stride):
        for program in programs(name, ranks, microbatches, stages_per_rank):
            check(program, f"slow {name} {ranks} {microbatches} {stages_per_rank}", per_kind=5)


@pytest.mark.parametrize("count", tiers(1, 12))
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_of_larger_schedules(name: str, count: int) -> None:
    dice = random.Random(name)
    for _ in range(count):
        ranks, microbatches = dice.randint(4, 8), dice.randint(5, 16)
        schedule = build(name, ranks, microbatches, dice.choice(stage_counts(name, 4)))
        program = lower(schedule, reduce=True, window=dice.randint(1, 3))
        verify(program)
        check(program, f"large {name} {ranks} {microbatches}", per_kind=3)
