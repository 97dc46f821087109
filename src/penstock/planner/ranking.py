"""From a model and a cluster to ranked plans: enumerate, leave out what does not fit, price the rest.

Candidates are taken in the order of a lower bound of their step time, and simulated only while they could be the
fastest of their layout and their layout among those that are ranked. So the ranking is that of pricing everything, for
a fraction of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from heapq import heappop, heappush, nsmallest
from itertools import count
from math import inf
from typing import Any, TypeVar

from penstock.errors import UsageError
from penstock.planner.candidates import PlanCandidate, default_families, families_for
from penstock.planner.cluster import Cluster
from penstock.planner.layout import MeshLayout, layouts
from penstock.planner.plans import Plan, Plans, Rejected
from penstock.planner.price import Pricing
from penstock.planner.profile import Profile
from penstock.schedule import family, search_report, simulate
from penstock.tools.search.explore import without_collecting
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.run.memory import KINDS, Memory, optimizer_states
from penstock.view.figures import bytes_text

PER_RANK = (1, 2, 3, 4, 6, 8)  # Stages per rank that are tried.
ROWS = (1, 2, 4, 8, 16, 32, 64)  # Rows of a microbatch.
FEW_SIZES = 4  # Where fewer of these divide a batch, its other divisors are looked at too.
RANKED = 10  # Layouts that are priced to the end.
SEARCHED, EFFORT = 512, 300  # Microbatch-stages of plans whose schedule is also searched for; orders that are priced.
ALIKE = 1.01  # Times that differ by less than this factor are alike.
PRICED = 16  # Candidates that do not fit and are priced, for the advice on memory.
WORTH = 0.01  # What a searched schedule must save, as a share of the makespan.
PricingOf = Callable[[MeshLayout, int], Pricing]
OfCut = Callable[[], Iterable[PlanCandidate]]
Key = TypeVar("Key")


@dataclass(frozen=True)
class SearchSpace:
    """What plans may choose from, for a batch of so many rows."""

    batch: int
    states: float  # Numbers that the optimizer keeps per parameter.
    schedules: Sequence[str] = field(default_factory=default_families)
    recompute: Sequence[bool] = (False, True)
    rows: Sequence[int] = ROWS
    per_rank: Sequence[int] = PER_RANK


def candidates(layout: MeshLayout, pricing_of: PricingOf, space: SearchSpace) -> Iterator[PlanCandidate]:
    """Yield every way to run a layout."""
    for _, of_cut in _cuts_of(layout, pricing_of, space):
        yield from of_cut()


def _cuts_of(layout: MeshLayout, pricing_of: PricingOf, space: SearchSpace) -> Iterator[tuple[float, OfCut]]:
    """Yield, per size of microbatches and number of stages, seconds at least, and what finds the candidates."""
    share = space.batch // layout.dp
    for rows in sizes_of_microbatches(share, space.rows):
        pricing = pricing_of(layout, rows)
        if rows < pricing.profile.least_rows:
            continue
        for per_rank in space.per_rank if layout.pp > 1 else (1,):
            if per_rank == 1 or share // rows % layout.pp == 0 or not pricing.cluster.software.whole_rounds:
                of_cut = partial(_candidates_of_cut, pricing, per_rank, share // rows, space)
                yield share // rows * pricing.work, of_cut


def _candidates_of_cut(
    pricing: Pricing, per_rank: int, microbatches: int, space: SearchSpace
) -> Iterator[PlanCandidate]:
    cuts = pricing.cut(pricing.layout.pp * per_rank)
    if cuts is not None:
        for name in families_for(pricing.layout.pp, per_rank, space.schedules):
            for recompute in space.recompute:
                yield PlanCandidate(pricing, name, per_rank, microbatches, recompute, tuple(cuts), space.states)


def sizes_of_microbatches(share: int, rows: Sequence[int]) -> list[int]:
    """Return the rows of a microbatch that divide those of a replica."""
    found = [each for each in rows if share % each == 0]
    if len(found) < FEW_SIZES and rows == ROWS:
        found = [each for each in range(1, ROWS[-1] + 1) if share % each == 0]
    return found


@dataclass
class _Choice:
    """What was found out about the candidates of a layout."""

    best: PlanCandidate | None = None  # The fastest one that fits.
    seconds: float = inf  # Its step.
    bound: float = inf  # What was not simulated takes at least so many seconds.
    closest: PlanCandidate | None = None  # The one that does not fit with the fewest bytes too many.
    excess: float = inf  # These bytes, nearly at least.
    larger: list[PlanCandidate] = field(default_factory=list)  # Those that would fit into twice the room.

    def reject(self, candidate: PlanCandidate, excess: float, room: float) -> None:
        """Note a candidate that needs `excess` bytes more than the room, nearly at least."""
        if excess <= room:
            self.larger.append(candidate)
        if excess < self.excess:
            self.closest, self.excess = candidate, excess


def choose(found: Iterable[PlanCandidate], room: float) -> _Choice:
    """Choose the fastest candidate that fits into `room` bytes."""
    return _choose_each({None: [(0.0, lambda: found)]}, room)[None]


def _choose_each(
    groups: Mapping[Key, Iterable[tuple[float, OfCut]]], room: float, ranked: int = RANKED, within: float = inf
) -> dict[Key, _Choice]:
    """Choose the fastest candidate of each group that fits into `room` bytes, of the `ranked` fastest groups.

    Nothing that takes more than `within` seconds is looked at.

    Cuts and candidates wait in one queue, by the time that they take at least: the candidates of a cut together, by the
    model's work alone, then each of them by its own bound. So no model is cut, and nothing is simulated, whose bound
    is above the time of what is chosen in the end.
    """
    choices = {key: _Choice() for key in groups}
    without: set[tuple[object, ...]] = set()  # What fits without recomputing, and is not slower then.
    numbers = count()
    queue: list[tuple[float, int, Key, OfCut | PlanCandidate]] = []
    for key, cuts in groups.items():
        for bound, of_cut in cuts:
            heappush(queue, (bound, next(numbers), key, of_cut))
    limit = within
    while queue:
        bound, _, key, candidate = heappop(queue)
        choice = choices[key]
        if bound >= (1 - 1e-9) * min(choice.seconds, limit):
            choice.bound = min(choice.bound, bound)
        elif not isinstance(candidate, PlanCandidate):
            for each in candidate():
                if each.least_bytes > room:
                    choice.reject(each, each.least_bytes - room, room)
                else:
                    heappush(queue, (each.bound, next(numbers), key, each))
        elif (way := (candidate.pricing, candidate.family, candidate.stages_per_rank)) not in without:
            excess = candidate.needs_more_than(room) or candidate.fullest.process - room
            if excess > 0:
                choice.reject(candidate, excess, room)
                continue
            without.add(way)
            if candidate.seconds < choice.seconds:
                choice.best, choice.seconds = candidate, candidate.seconds
                fastest = sorted(each.seconds for each in choices.values())
                limit = min(within, fastest[ranked - 1]) if len(fastest) >= ranked else within
    return choices


def rank_plans(
    config: TrainConfig,
    profile: Profile,
    cluster: Cluster,
    *,
    among: Iterable[MeshLayout] | None = None,
    pricing_of: PricingOf | None = None,
    space: SearchSpace | None = None,
) -> Plans:
    """Make all plans, the fastest first; `among` are the only layouts to look at."""
    space = space or SearchSpace(config.data.batch, optimizer_states(config))
    pricing_of = cache(pricing_of or (lambda layout, rows: Pricing(profile, cluster, layout, rows)))
    every = layouts_of(profile, cluster, space.batch) if among is None else among
    with without_collecting():
        chosen, rejected = _choose_all(every, pricing_of, space, cluster.room)
    found = [(layout, choice.best) for layout, choice in chosen if choice.best is not None]
    if found:
        found[0] = found[0][0], _searched(found[0][1])
    plans = [make_plan(config, candidate, profile, cluster) for _, candidate in found]
    advice = [*_advice(plans[0], [choice for _, choice in chosen], cluster)] if plans else []
    if plans and among is None:
        advice += _fewer_devices(plans[0].seconds, profile, cluster, space)
    if plans and profile.undivided and among is None and cluster.devices > 1:
        advice.append(f"without tp, because {profile.undivided}")
    return Plans(tuple(plans), tuple(rejected), tuple(advice), cluster, profile.parameters)


def _fewer_devices(seconds: float, profile: Profile, cluster: Cluster, space: SearchSpace) -> Iterator[str]:
    """Yield what a half, a quarter, ... of the devices would take, if that is as little as `seconds`."""
    part, best, within = cluster, None, ALIKE * seconds
    while part.world > 1:
        size = replace(part, hosts=part.hosts // 2) if part.hosts > 1 else replace(part, devices=part.devices // 2)
        part, pricing_of = size, cache(partial(Pricing, profile, size))
        every = layouts(part, **_limits_of(profile), batch=space.batch)
        ways, _ = _ways(every, pricing_of, space, part.room)
        if min((bound for group in ways.values() for bound, _ in group), default=inf) >= within:
            break  # Nothing can be faster, on these and on fewer.
        with without_collecting():
            choices = _choose_each(ways, part.room, 1, within)
        found = min(choices.values(), key=lambda choice: choice.seconds)
        if found.best is not None and found.seconds < within:
            best, within = (part, found.best), found.seconds
    if best is not None:
        yield (
            f"devices: {best[0].world} of the {cluster.world} take {best[1].seconds:.4g} s, with {best[1].layout} and "
            f"{best[1].family}; more of them do not help a batch of {space.batch} rows"
        )


def _choose_all(
    every: Iterable[MeshLayout], pricing_of: PricingOf, space: SearchSpace, room: float
) -> tuple[list[tuple[MeshLayout, _Choice]], list[Rejected]]:
    """Return the best of each layout, the fastest first, as many as are ranked; and why the others were left out."""
    ways, too_large = _ways(every, pricing_of, space, room)
    found = _choose_each(ways, room)
    chosen = sorted(
        ((layout, choice) for layout, choice in found.items() if choice.best is not None),
        key=lambda each: each[1].seconds,
    )
    rejected: list[Rejected] = []
    for layout in sorted(ways, key=lambda each: min((bound for bound, _ in ways[each]), default=inf)):
        if found[layout].best is None:
            rejected.append(Rejected(layout, _why_not(layout, found[layout], room, space)))
    for layout, choice in chosen[RANKED:]:
        rejected.append(Rejected(layout, f"takes {choice.seconds:.4g} s, longer than the plans above"))
    for layout, memory in sorted(too_large.items(), key=lambda each: each[1].process):
        rejected.append(Rejected(layout, _too_much(memory, room, "before any activation", KINDS[:-1])))
    return chosen[:RANKED], rejected


def _ways(
    every: Iterable[MeshLayout], pricing_of: PricingOf, space: SearchSpace, room: float
) -> tuple[dict[MeshLayout, list[tuple[float, OfCut]]], dict[MeshLayout, Memory]]:
    """Return the cuts of all layouts that may fit; and what others hold on average, before any activation."""
    groups: dict[MeshLayout, list[MeshLayout]] = {}  # Both placements on hosts are one layout.
    for layout in every:
        groups.setdefault(replace(layout, inner="dp"), []).append(layout)
    least = {layout: pricing_of(group[0], 1).average(space.states) for layout, group in groups.items()}
    too_large = {layout: memory for layout, memory in least.items() if memory.process > room}
    ways = {
        layout: [way for each in group for way in _cuts_of(each, pricing_of, space)]
        for layout, group in groups.items()
        if layout not in too_large
    }
    return ways, too_large


def layouts_of(profile: Profile, cluster: Cluster, batch: int) -> list[MeshLayout]:
    """List every layout that a model can have on a cluster."""
    found = list(layouts(cluster, **_limits_of(profile), batch=batch))
    if not found:
        places = sum(profile.counts_of(()))
        raise UsageError(
            f"a batch of {batch} rows cannot be divided over {cluster.world} devices: no pp x dp x tp of that product "
            f"has a dp that divides it, and a pp of at most {places} pieces of the model; a multiple of "
            f"{cluster.world} rows can be divided"
        )
    return found


def _limits_of(profile: Profile) -> dict[str, Any]:
    """Return what a model says of the layouts that it can have."""
    divisible = any(unit.parameters.divided for unit in profile.one)
    return {"most_stages": sum(profile.counts_of(())), "heads": profile.attention, "divisible": divisible}


def _why_not(layout: MeshLayout, choice: _Choice, room: float, space: SearchSpace) -> str:
    if choice.bound < inf:
        return f"takes {choice.bound:.4g} s at least, longer than the plans above"
    if (closest := choice.closest) is None:
        return f"no rows per microbatch divide its {space.batch // layout.dp} rows per replica, or too few layers"
    return _too_much(closest.fullest, room, f"{closest.family}{', recomputed' if closest.recompute else ''}")


def _too_much(memory: Memory, room: float, what: str, names: Sequence[str] = KINDS) -> str:
    parts = ", ".join(f"{name} {bytes_text(getattr(memory, name))}" for name in names)
    return (
        f"needs {bytes_text(memory.process)} per device, of {bytes_text(room)} that a plan may fill ({what}: {parts})"
    )


def make_plan(config: TrainConfig, candidate: PlanCandidate, profile: Profile, cluster: Cluster) -> Plan:
    """Make the plan of a candidate."""
    layout, rows, seconds = candidate.layout, candidate.pricing.rows, candidate.seconds
    batch = rows * candidate.microbatches * layout.dp
    return Plan(
        layout,
        candidate.family,
        len(candidate.stages),
        candidate.microbatches,
        rows,
        candidate.recompute,
        profile.names_of(candidate.cuts),
        profile.counts_of(candidate.cuts),
        seconds,
        cluster.error,
        batch * profile.sequence / seconds,
        batch * profile.model_flops / seconds / (cluster.world * cluster.device.peak),
        candidate.priced[1],
        candidate.memory,
        _shares(candidate),
        config,
        profile.by_position,
        candidate.schedule,
    )


def _shares(candidate: PlanCandidate) -> dict[str, float]:
    """Return where the time of a step goes, by name: seconds."""
    work = candidate.microbatches / candidate.layout.pp
    shares = {name: work * each for name, each in candidate.pricing.shares(candidate.cuts, candidate.split).items()}
    if candidate.recompute:
        shares["recomputing"] = work * sum(each.again for each in candidate.stages)
    idle = max(0.0, candidate.priced[0] - sum(shares.values()))
    reduction, update = candidate.around
    return {**shares, "idle": idle, "reduction": reduction, "update": update}


def _searched(candidate: PlanCandidate) -> PlanCandidate:
    """Search for a schedule within the family's memory; return the candidate with it where that is clearly faster."""
    stages = candidate.layout.pp * candidate.stages_per_rank
    if candidate.layout.pp == 1 or stages * candidate.microbatches > SEARCHED:
        return candidate
    before = simulate(candidate.schedule(), candidate.costs)
    found = search_report(
        candidate.layout.pp,
        candidate.microbatches,
        candidate.costs,
        memory=list(before.peak_memory),
        stages_per_rank=candidate.stages_per_rank,
        placements="v" if family(candidate.family).layout == "v" else "loop",
        effort=EFFORT,
    )
    after = replace(candidate, family="searched", searched=found.schedule)
    if candidate.is_measured and not after.is_measured:
        return candidate  # Only whole backwards were measured, and these are split.
    is_larger = any(a[0] > b[0] or a[1] > b[1] for a, b in zip(after.peaks, candidate.peaks, strict=True))
    saved = candidate.priced[0] - after.priced[0]
    return candidate if is_larger or saved < WORTH * candidate.priced[0] else after


def _advice(best: Plan, chosen: Sequence[_Choice], cluster: Cluster) -> Iterator[str]:
    """Describe what limits the best plan."""
    first, *others = best.shares  # The work itself comes first.
    kind = max(others, key=lambda name: best.shares[name])
    yield f"{first}: {best.shares[first] / best.seconds:.0%} of a step; {kind}: {best.shares[kind] / best.seconds:.0%}"
    larger, limit = None, 0.97 * best.seconds
    rejected = [each for choice in chosen for each in choice.larger]
    for candidate in nsmallest(PRICED, rejected, key=lambda each: each.bound):
        if candidate.bound >= limit:
            break
        if candidate.fullest.process <= 2 * cluster.room and candidate.seconds < limit:
            larger, limit = candidate, candidate.seconds
    if larger is not None:
        more = (
            1.001 * (larger.fullest.process - cluster.room) / (1 - cluster.device.headroom)
        )  # Rounded, it still fits.
        yield (
            f"memory: with {bytes_text(more)} more per device, {larger.layout} with {larger.family} would fit and take "
            f"{larger.seconds:.4g} s, {1 - larger.seconds / best.seconds:.0%} less"
        )
