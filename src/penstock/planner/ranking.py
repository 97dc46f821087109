"""From a model and a cluster to ranked plans: enumerate, leave out what does not fit, price the rest.

For each layout its candidates are taken in the order of the time that they cannot beat, and simulated until no other
can be better than the best one found. So the ranking is that of pricing everything, for a fraction of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import inf

from penstock.errors import UsageError
from penstock.planner.candidates import PlanCandidate, default_families, families_for
from penstock.planner.cluster import Cluster
from penstock.planner.layout import MeshLayout, layouts
from penstock.planner.plans import Plan, Plans, Rejected
from penstock.planner.price import Pricing
from penstock.planner.profile import Profile
from penstock.schedule import family, search_report, simulate
from penstock.train.config.settings import TrainConfig
from penstock.train.run.account import optimizer_states

PER_RANK = (1, 2, 3, 4, 6, 8)  # stages per rank that are tried
ROWS = (1, 2, 4, 8, 16, 32, 64)  # rows of a microbatch
RANKED = 10  # layouts that are priced to the end
SEARCHED, EFFORT = 512, 300  # microbatch-stages of plans whose schedule is also searched for; orders that are priced
WORTH = 0.01  # of the makespan: what a searched schedule must save
PricingOf = Callable[[MeshLayout, int], Pricing]


@dataclass(frozen=True)
class Wanted:
    """What may be chosen from."""

    batch: int
    states: float
    schedules: Sequence[str] = field(default_factory=default_families)
    recompute: Sequence[bool] = (False, True)
    rows: Sequence[int] = ROWS
    per_rank: Sequence[int] = PER_RANK


def candidates(layout: MeshLayout, pricing_of: PricingOf, wanted: Wanted) -> Iterator[PlanCandidate]:
    """Every way to run a layout."""
    share = wanted.batch // layout.dp
    for rows in wanted.rows:
        if share % rows:
            continue
        pricing = pricing_of(layout, rows)
        for per_rank in wanted.per_rank if layout.pp > 1 else (1,):
            cuts = pricing.cut(layout.pp * per_rank)
            if cuts is None:
                continue
            if per_rank > 1 and share // rows % layout.pp and pricing.cluster.software.whole_rounds:
                continue
            for name in families_for(layout.pp, per_rank, wanted.schedules):
                for recompute in wanted.recompute:
                    yield PlanCandidate(pricing, name, per_rank, share // rows, recompute, tuple(cuts), wanted.states)


@dataclass
class _Choice:
    """The best candidate of a layout, or the one that came closest to fitting."""

    best: PlanCandidate | None = None
    seconds: float = inf
    least: float = inf  # seconds that the fastest one takes at least that could fit
    nearest: tuple[float, PlanCandidate] | None = None  # bytes too many
    blocked: float = inf  # seconds that a candidate would take at least for which memory is short
    short: float = 0.0  # by so many bytes

    def miss(self, candidate: PlanCandidate, over: float) -> None:
        """A candidate that needs so many bytes too many."""
        if self.nearest is None or over < self.nearest[0]:
            self.nearest = over, candidate
        if candidate.bound < self.blocked:
            self.blocked, self.short = candidate.bound, over


def choose(found: Iterable[PlanCandidate], room: float, limit: float = inf) -> _Choice:
    """The fastest candidate that fits into `room` bytes, if one can take less than `limit` seconds."""
    choice = _Choice()
    fitting: list[PlanCandidate] = []
    for candidate in found:
        least = candidate.microbatches * candidate.pricing.work
        over = 0.0 if least >= limit else candidate.static_bytes - room
        if least >= limit:
            choice.least = min(choice.least, least)
        elif over > 0:
            choice.miss(candidate, over)
        else:
            fitting.append(candidate)
    without: set[tuple[object, ...]] = set()  # what fits without recomputing, and is not slower then
    for candidate in sorted(fitting, key=lambda each: each.bound):
        if candidate.bound >= (1 - 1e-9) * min(choice.seconds, limit):
            choice.least = min(choice.least, candidate.bound)
            break
        key = candidate.pricing, candidate.family, candidate.stages_per_rank
        if key in without:
            continue
        over = candidate.sure_bytes - room
        if over <= 0:
            over = candidate.fullest.process - room
        if over > 0:
            choice.miss(candidate, over)
            continue
        without.add(key)
        if candidate.seconds < choice.seconds:
            choice.best, choice.seconds = candidate, candidate.seconds
    return choice


def rank_plans(
    config: TrainConfig,
    profile: Profile,
    cluster: Cluster,
    *,
    among: Iterable[MeshLayout] | None = None,
    pricing_of: PricingOf | None = None,
    wanted: Wanted | None = None,
) -> Plans:
    """All plans, the fastest first."""
    wanted = wanted or Wanted(config.data.batch, optimizer_states(config))
    pricing_of = cache(pricing_of or (lambda layout, rows: Pricing(profile, cluster, layout, rows)))
    groups: dict[MeshLayout, list[MeshLayout]] = {}  # both placements on hosts are one layout
    for layout in layouts_of(profile, cluster, wanted.batch) if among is None else among:
        groups.setdefault(replace(layout, inner="dp"), []).append(layout)
    least = {
        layout: min(
            (wanted.batch / layout.dp / rows * pricing_of(each, rows).work for each in group for rows in wanted.rows),
            default=0.0,
        )
        for layout, group in groups.items()
    }
    chosen: list[tuple[float, MeshLayout, _Choice]] = []
    rejected: list[Rejected] = []
    for layout in sorted(groups, key=lambda each: least[each]):
        limit = sorted(each[0] for each in chosen)[RANKED - 1] if len(chosen) >= RANKED else inf
        ways = (way for each in groups[layout] for way in candidates(each, pricing_of, wanted))
        choice = _Choice(least=least[layout]) if least[layout] >= limit else choose(ways, cluster.room, limit)
        if choice.best is not None:
            chosen.append((choice.seconds, layout, choice))
        elif choice.least < inf:
            why = f"takes {choice.least:.4g} s at least, longer than the plans above"
            rejected.append(Rejected(layout, why))
        else:
            rejected.append(Rejected(layout, _why_not(layout, choice, cluster, wanted)))
    chosen.sort(key=lambda each: each[0])
    for seconds, layout, _ in chosen[RANKED:]:
        rejected.append(Rejected(layout, f"takes {seconds:.4g} s, longer than the plans above"))
    plans = [make_plan(config, each[2].best, profile, cluster) for each in chosen[:RANKED] if each[2].best is not None]
    advice: tuple[str, ...] = ()
    if plans:
        plans[0] = _searched(plans[0], chosen[0][2].best)
        advice = tuple(_advice(plans[0], chosen))
    return Plans(tuple(plans), tuple(rejected), advice, cluster, profile.parameters)


def layouts_of(profile: Profile, cluster: Cluster, batch: int) -> list[MeshLayout]:
    """Every layout that a model can have on a cluster."""
    places = sum(1 for unit in profile.one if unit.name)
    divisible = any(unit.parameters.divided for unit in profile.one)
    found = list(layouts(cluster, most_stages=places, heads=profile.attention, batch=batch, divisible=divisible))
    if not found:
        raise UsageError(
            f"a batch of {batch} rows cannot be divided over {cluster.world} devices: no pp x dp x tp of that product "
            f"has a dp that divides it, and a pp of at most {places} pieces of the model"
        )
    return found


def _why_not(layout: MeshLayout, choice: _Choice, cluster: Cluster, wanted: Wanted) -> str:
    if choice.nearest is None:
        return f"no rows per microbatch divide its {wanted.batch // layout.dp} rows per replica, or too few layers"
    over, candidate = choice.nearest
    memory = candidate.fullest
    room = f"{cluster.room / 1e9:.1f} GB that a plan may fill"
    parts = ", ".join(
        f"{name} {getattr(memory, name) / 1e9:.1f}" for name in ("weights", "gradients", "optimizer", "activations")
    )
    return (
        f"needs {(cluster.room + over) / 1e9:.1f} GB per device at best, of {room} "
        f"({candidate.family}{', recomputed' if candidate.recompute else ''}: {parts})"
    )


def make_plan(config: TrainConfig, candidate: PlanCandidate, profile: Profile, cluster: Cluster) -> Plan:
    """The plan of a candidate; of a short pipeline the schedule is searched for as well."""
    layout, (makespan, idle) = candidate.layout, candidate.priced
    schedule, name = candidate.schedule(), candidate.family
    seconds = makespan + sum(candidate.around)
    rows = candidate.pricing.rows
    batch = rows * candidate.microbatches * layout.dp
    starts = [candidate.pricing.units[place].name for place in candidate.cuts]
    named = [number for number, unit in enumerate(candidate.pricing.units) if unit.name]
    bounds = [0, *candidate.cuts, len(candidate.pricing.units)]
    counts = tuple(sum(begin <= number < end for number in named) for begin, end in pairwise(bounds))
    return Plan(
        layout,
        name,
        schedule,
        rows,
        candidate.recompute,
        tuple(starts),
        counts,
        seconds,
        cluster.error,
        batch * profile.sequence / seconds,
        batch * profile.model_flops / seconds / (cluster.world * cluster.device.peak),
        idle,
        candidate.memory,
        _shares(candidate),
        config,
        profile.by_position,
    )


def _shares(candidate: PlanCandidate) -> dict[str, float]:
    """Where the time of a step goes, by name: seconds."""
    work = candidate.microbatches / candidate.layout.pp
    shares = {name: work * each for name, each in candidate.pricing.shares(candidate.cuts, candidate.split).items()}
    if candidate.recompute:
        shares["recomputing"] = work * sum(each.again for each in candidate.stages)
    reduction, update = candidate.around
    return {
        **shares,
        "idle": max(0.0, candidate.priced[0] - sum(shares.values())),
        "reduction": reduction,
        "update": update,
    }


def _searched(plan: Plan, candidate: PlanCandidate | None) -> Plan:
    """The same with a schedule that is searched for within the family's memory, where that is clearly faster."""
    if candidate is None or candidate.layout.pp == 1 or plan.schedule.stages * plan.microbatches > SEARCHED:
        return plan
    before = simulate(plan.schedule, candidate.costs)
    found = search_report(
        candidate.layout.pp,
        plan.microbatches,
        candidate.costs,
        memory=list(before.peak_memory),
        stages_per_rank=candidate.stages_per_rank,
        placements="v" if family(candidate.family).layout == "v" else "loop",
        effort=EFFORT,
    )
    after = simulate(found.schedule, candidate.costs)
    saved = before.makespan - after.makespan
    if saved < WORTH * before.makespan or any(
        a > b for a, b in zip(after.peak_memory, before.peak_memory, strict=True)
    ):
        return plan
    seconds = plan.seconds - saved
    return replace(
        plan,
        family="searched",
        schedule=found.schedule,
        seconds=seconds,
        idle=after.bubble,
        tokens_per_second=plan.tokens_per_second * plan.seconds / seconds,
        mfu=plan.mfu * plan.seconds / seconds,
        shares={**plan.shares, "idle": max(0.0, plan.shares["idle"] - saved)},
    )


def _advice(best: Plan, chosen: Sequence[tuple[float, MeshLayout, _Choice]]) -> Iterator[str]:
    """What limits the best plan."""
    first, *others = best.shares  # the work itself, and the rest
    kind = max(others, key=lambda name: best.shares[name])
    yield f"{first}: {best.shares[first] / best.seconds:.0%} of a step; {kind}: {best.shares[kind] / best.seconds:.0%}"
    blocked = min((each[2] for each in chosen), key=lambda choice: choice.blocked)
    if blocked.blocked < 0.97 * best.seconds:
        yield (
            f"memory: with {blocked.short / 1e9:.1f} GB more per device a step could take {blocked.blocked:.4g} s at "
            f"best, {1 - blocked.blocked / best.seconds:.0%} less"
        )
