"""What a layout costs: the time and memory of each stage, from a profile and a cluster.

A stage's forward takes

    products / (peak x efficiency) + other traffic / memory bandwidth + sums over the tensor-parallel axis

(a product with a weight whose smaller dimension is d reaches d / (d + thin) of that efficiency)
and so do its backward for inputs and its backward for weights, with what each has of these. The schedule makes a step
of the stages (`simulate`); after it come what is left of the reduction of gradients, and the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeVar

from penstock.model.balance.partition import partition
from penstock.planner.cluster import Cluster
from penstock.planner.counting import OperationCounts
from penstock.planner.layout import MeshLayout, all_reduce, gather
from penstock.planner.profile import Profile, Unit
from penstock.runtime.backward.deferred_weights import BYTES_PER_PASS
from penstock.schedule import Costs
from penstock.tools.train.run.memory import Memory, exchanged_bytes, rank_memory

UPDATE_READS = 2  # How often an optimizer reads and writes each of its numbers.
BUCKET = 25 * 2**20  # Bytes of gradients that travel together.
Found = TypeVar("Found")


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of one stage and one microbatch."""

    forward: float
    input: float
    weight: float
    again: float  # The part of the forward that recomputing repeats.
    saved: float  # Bytes from the forward to the backward.
    held: float  # Bytes from I to W.
    taken: float  # Bytes of its input.
    kept: float  # Bytes from the forward to the backward where it recomputes.
    burst: float  # Bytes that recomputing then makes.
    extra: float  # Bytes that computing needs for a moment, beside those.
    early: float  # What only a first backward needs besides, because gradients come while activations go.
    output: float  # Bytes that it sends.
    numbers: float  # Parameters.
    trained: float
    copies: float  # Bytes of parameters in another type.


NOTHING = StageCosts(*[0.0] * len(fields(StageCosts)))


class Pricing:
    """The units of a model on the devices of a cluster, under one layout and one size of microbatches."""

    def __init__(self, profile: Profile, cluster: Cluster, layout: MeshLayout, rows: int) -> None:
        self.profile, self.cluster, self.layout, self.rows = profile, cluster, layout, rows
        self.units = profile.units(rows / layout.cp)
        self.divides = cluster.software.sequence_parallel and layout.tp > 1
        self.shared: dict[Any, Any] = {}  # What candidates have in common.
        self._alike = profile.notes((cluster, layout.tp, layout.cp, rows))  # What layouts have in common.

    def shares(self, cuts: tuple[int, ...], split: bool) -> dict[str, float]:
        """Return where the time of one microbatch on the whole model goes, by name: seconds."""
        device, tp = self.cluster.device, self.layout.tp
        parts = [part for unit in self.units for part in (unit.forward, unit.backward)]
        slower = 1 / device.attention - 1
        flops = sum(part.flops.at(tp) + slower * part.attention.at(tp) for part in parts)
        flops += 3 * sum(self._thin(unit) for unit in self.units)
        products = flops / (device.peak * device.efficiency)
        traffic = sum(part.traffic.at(tp, self.divides) for part in parts) / device.bandwidth
        links = max(0.0, sum(map(sum, self.seconds)) - products - traffic)
        return {"products": products, "memory traffic": traffic, "tensor-parallel links": links}

    @property
    def work(self) -> float:
        """Seconds of one microbatch that a rank of the pipeline has on average, nothing recomputed."""
        return self._noted("work", lambda: sum(map(sum, self.seconds))) / self.layout.pp

    def _noted(self, key: object, find: Callable[[], Found]) -> Found:
        """Find a figure once for all layouts with as much tensor and context parallelism."""
        if key not in self._alike:
            self._alike[key] = find()
        found: Found = self._alike[key]
        return found

    @property
    def seconds(self) -> list[tuple[float, float, float]]:
        """F, I and W of each unit."""
        return self._noted("seconds", self._all_seconds)

    def _all_seconds(self) -> list[tuple[float, float, float]]:
        known = {id(unit.forward): unit for unit in self.units}  # Layers that repeat are one object.
        times = {key: self._seconds(unit) for key, unit in known.items()}
        return [times[id(unit.forward)] for unit in self.units]

    def _seconds(self, unit: Unit) -> tuple[float, float, float]:
        device, tp = self.cluster.device, self.layout.tp
        rate, slower = device.peak * device.efficiency, 1 / device.attention - 1
        weight, thin = unit.forward.weight_flops.at(tp), self._thin(unit)

        def computing(part: OperationCounts, elsewhere: float) -> float:
            flops = thin + part.flops.at(tp) + slower * part.attention.at(tp) - elsewhere
            return flops / rate + part.traffic.at(tp, self.divides) / device.bandwidth + self._links(unit, part)

        return computing(unit.forward, 0.0), max(0.0, computing(unit.backward, weight)), (weight + thin) / rate

    def _thin(self, unit: Unit) -> float:
        """Count the operations that could be done in the time that products with thin weights lose."""
        tp = self.layout.tp
        return self.cluster.device.thin * unit.forward.thinness(tp) * unit.forward.weight_flops.at(tp)

    def _links(self, unit: Unit, part: OperationCounts) -> float:
        """Time what ranks of the tensor-parallel axis exchange, and the keys and values of the context-parallel one."""
        layout, cluster = self.layout, self.cluster
        seconds = all_reduce(part.summed, layout, "tp", cluster) + gather(part.gathered, layout, "tp", cluster)
        seconds += part.collectives * cluster.inside.latency * (layout.tp > 1)
        if layout.cp > 1:
            keys = unit.forward.keys * self.profile.keys_share * layout.cp / layout.tp
            seconds += gather(keys, layout, "cp", cluster)
        return seconds

    def cut(self, stages: int) -> tuple[int, ...] | None:
        """Choose the units that stages 1, 2, ... begin with, so that the longest is short; None if they are few."""
        return self._noted(("cut", stages), lambda: self._cut(stages))

    def _cut(self, stages: int) -> tuple[int, ...] | None:
        if self.cluster.software.name == "megatron":
            return self._equal_cut(stages)
        times = [sum(each) for each in self.seconds]
        starts = [number for number, unit in enumerate(self.units) if unit.name and number]
        if starts and not any(unit.parameters.at(1) for unit in self.units[: starts[0]]):
            starts.pop(0)  # Nothing is before it that could be a stage.
        if stages - 1 > len(starts):
            return None
        unit = max(times) / 50 or 1.0  # What differs less is alike, so that cuts can be used again.
        return _cuts(tuple(round(each / unit) for each in times), tuple(starts), stages)

    def _equal_cut(self, stages: int) -> tuple[int, ...] | None:
        """Put as many layers into each stage, or one less into the first and the last, with what is around them."""
        layers = [number for number, unit in enumerate(self.units) if unit.name in self._repeated]
        spared = next((spared for spared in (0, 1) if (len(layers) + 2 * spared) % stages == 0), None)
        if spared is None or stages > len(layers) + 2 * spared:
            return None
        layers.append(layers[-1] + 1)  # A last stage without layers has what follows them.
        size = (len(layers) - 1 + 2 * spared) // stages
        return tuple(layers[size * stage - spared] for stage in range(1, stages))

    def stage(self, begin: int, end: int, split: bool = False) -> StageCosts:
        """Price a stage of units `begin` to `end - 1`; `split`: with backwards as I and W."""
        tp, divides, units = self.layout.tp, self.divides, self.units[begin:end]
        forward, backward, weight = (sum(each) for each in zip(*self.seconds[begin:end], strict=True))
        taken = self.units[begin - 1].output if begin else 0.0
        output = units[-1].output if end < len(self.units) else 0.0
        if divides:
            taken, output = taken / tp, output / tp
        saved, extra = taken, 0.0
        for unit in units:
            extra = max(extra, saved + unit.rise.at(tp, divides))
            saved += unit.saved.at(tp, divides)
        saved = max(0.0, saved - output)
        extra = max(0.0, extra - saved)
        extra, early = self._backward_peaks(units, output, extra, split)
        held = sum(unit.forward.deferred.at(tp, divides) for unit in units)
        again, kept, burst = forward, taken, saved
        if self.cluster.software.name == "megatron":  # It recomputes layer by layer, and not what is around them.
            kept, burst = self._by_layer(begin, end)
            again = sum(self.seconds[each][0] for each in range(begin, end) if self.units[each].name in self._repeated)
        return StageCosts(
            forward,
            backward,
            weight,
            again,
            saved,
            min(saved + output, held) if held else 0.0,
            taken,
            kept,
            burst,
            extra,
            early,
            output,
            sum(unit.parameters.at(tp) for unit in units),
            sum(unit.trained.at(tp) for unit in units),
            sum(unit.forward.copies.at(tp) for unit in units),
        )

    def _backward_peaks(self, units: Sequence[Unit], output: float, extra: float, split: bool) -> tuple[float, float]:
        """Count bytes above those when a backward began: in any (`extra` or more), and what a first one adds."""
        tp, divides = self.layout.tp, self.divides
        gone = made = freed = first = 0.0  # What I or B has freed; gradients, and what is freed where these are made.
        for unit in reversed(units):
            saved, needed = unit.saved.at(tp, divides), output + unit.fall.at(tp, divides)
            deferred = unit.forward.deferred.at(tp, divides) if split else 0.0
            gradients = unit.trained.at(tp) * self._element.gradient
            extra = max(extra, needed - gone)
            if split:  # W has several gradients at once where they are small.
                extra = max(extra, gradients + min(made, BYTES_PER_PASS) - freed)
            first = max(first, made + (gradients if split else needed) - freed)
            gone, made, freed = gone + saved - deferred, made + gradients, freed + (deferred if split else saved)
        return extra, max(0.0, first - extra)

    def _by_layer(self, begin: int, end: int) -> tuple[float, float]:
        """Count bytes where each layer recomputes: inputs of layers and all of the rest, kept; and those of a layer."""
        tp, divides, kept, burst = self.layout.tp, self.divides, 0.0, 0.0
        for number in range(begin, end):
            unit = self.units[number]
            if unit.name in self._repeated:
                kept += self.units[number - 1].output / (tp if divides else 1)
                burst = max(burst, unit.saved.at(tp, divides))
            else:
                kept += unit.saved.at(tp, divides)
        return kept, burst

    @cached_property
    def _repeated(self) -> set[str]:
        """The names of layers that there are several of."""
        counts = Counter(unit.parameters.at(1) for unit in self.units if unit.name)
        return {unit.name for unit in self.units if unit.name and counts[unit.parameters.at(1)] > 1}

    def measured(self, cuts: Sequence[int], split: bool) -> Any:
        """Return what was measured of these stages, with backwards split or whole; None where nothing was."""
        return None

    def stages(self, cuts: tuple[int, ...], split: bool) -> list[StageCosts]:
        """Price the stages between cuts; `split`: with backwards as I and W."""
        return self._noted(("stages", cuts, split), lambda: self._count_stages(cuts, split))

    def _count_stages(self, cuts: tuple[int, ...], split: bool) -> list[StageCosts]:
        known: dict[tuple[object, ...], StageCosts] = self._noted("known", dict)
        found = []
        for begin, end in pairwise([0, *cuts, len(self.units)]):
            kinds = [id(unit.forward) for unit in self.units[max(0, begin - 1) : end]]
            key = (split, begin == 0, end == len(self.units), *kinds)
            if key not in known:
                known[key] = self.stage(begin, end, split)
            found.append(known[key])
        return found

    def costs(self, stages: Sequence[StageCosts], recompute: bool = False) -> Costs:
        """Return seconds and bytes for the simulator; `recompute`: of stages whose backward runs the forward again."""
        wire = self.layout.wire("pp", self.cluster)
        software = self.cluster.software
        # Each rank of Megatron's sends its part; under sequence parallelism it has no more than that.
        scattered = self.layout.tp if software.name == "megatron" and not software.sequence_parallel else 1
        waited = 0.0 if self.cluster.software.overlapped or self.layout.pp == 1 else 1 / scattered / wire.bandwidth
        return Costs(
            forward=[each.forward + waited * each.output for each in stages],
            input=[each.input + waited * each.taken + (each.again if recompute else 0.0) for each in stages],
            weight=[each.weight for each in stages],
            latency=wire.latency,
            bandwidth=wire.bandwidth,
            bytes=[each.output / scattered for each in stages],
            activation=[each.kept if recompute else each.saved for each in stages],
            held=[min(each.held, each.saved) for each in stages],
        )

    # -- around the pipeline

    def after(self, own: Sequence[StageCosts], microbatches: int) -> tuple[float, float]:
        """Time the gradients' reduction that nothing hides, and the optimizer, on a rank with these stages.

        Each stage's gradients leave when its last backward has ended, while other stages still compute, if the program
        overlaps. Without a pipeline, Megatron has torch's DDP, which sends them bucket by bucket during the last
        backward.
        """
        layout, element = self.layout, self._element
        sizes = [each.trained * element.gradient for each in own]
        moved = gather if layout.sharded else all_reduce
        reduce = sum(moved(size, layout, "dp", self.cluster) for size in sizes)
        if layout.sharded:  # The parameters are gathered before the first forward.
            reduce += sum(gather(each.numbers * element.weight, layout, "dp", self.cluster) for each in own)
        overlaps = self.cluster.software.overlapped
        hidden = min(layout.pp, microbatches) * sum(each.input + each.weight for each in own[1:]) if overlaps else 0.0
        last = reduce / len(own)
        if self.cluster.software.name == "megatron" and layout.pp == 1 and reduce:
            hidden = sum(each.input + each.weight + each.again for each in own)
            last *= min(1.0, BUCKET / sum(sizes))
        shares = layout.dp if layout.sharded else 1
        state = sum(each.trained for each in own) / shares * (2 * element.state + element.master + 2 * element.weight)
        return max(last, reduce - hidden), UPDATE_READS * state / self.cluster.device.bandwidth

    def average(self, states: float) -> Memory:
        """Return what a rank holds without activations if all hold as much: the fullest one has at least that."""
        tp, pp = self.layout.tp, self.layout.pp
        numbers = sum(unit.parameters.at(tp) for unit in self.units) / pp
        trained = sum(unit.trained.at(tp) for unit in self.units) / pp
        return self.memory([replace(NOTHING, numbers=numbers, trained=trained)], 0.0, states)

    def gradient_bytes(self, stage: StageCosts) -> float:
        """Count the bytes of a stage's gradients that a rank keeps until the update."""
        shares = self.layout.dp if self.layout.sharded and not self.cluster.software.master_weights else 1
        return stage.trained / shares * self._element.gradient

    def memory(
        self, own: Sequence[StageCosts], activations: float, states: float, together: float | None = None
    ) -> Memory:
        """Return what a rank with these stages holds; `states`: numbers that the optimizer keeps per parameter.

        `together` is the most of activations and gradients at one time; without it, their sum is taken.
        """
        layout, element, device = self.layout, self._element, self.cluster.device
        shares = layout.dp if layout.sharded else 1
        weights = sum(each.numbers for each in own) * element.weight
        trained = sum(each.trained for each in own)
        optimizer = trained / shares * (states * element.state + element.master)
        alone = device.reserved + (2 * max(each.output + each.taken for each in own) if layout.pp > 1 else 0.0)
        gradients = sum(map(self.gradient_bytes, own))
        before = activations
        activations += sum(each.copies for each in own)
        if self.cluster.software.master_weights:  # Replicas share what the optimizer has, and no gradients.
            together = None  # Gradients are there all the time.
            activations = max(activations, trained / shares * element.update)  # They are gone by the update.
            alone += min(BUCKET, gradients) if layout.dp > 1 else 0.0
            weights += weights / shares if layout.sharded else 0.0
        else:
            weights /= shares
            activations += exchanged_bytes(weights, gradients, layout.dp, layout.sharded)
        copy = weights + optimizer if device.holds_checkpoints else 0.0
        if together is not None:
            together += activations - before
        return rank_memory(weights, gradients, optimizer, activations, alone=alone, copy=copy, together=together)

    @cached_property
    def _element(self) -> _Element:
        if self.cluster.software.master_weights:
            gradient = self.cluster.software.gradient_bytes
            return _Element(2, gradient, 4, master=4, update=0 if gradient == 4 else 4)
        size = self.profile.element
        return _Element(size, size, size)


@dataclass(frozen=True)
class _Element:
    """Bytes per parameter."""

    weight: int
    gradient: int
    state: int  # Bytes of each number that the optimizer keeps.
    master: int = 0  # A copy in 32 bits.
    update: int = 0  # Gradients in 32 bits, when activations are gone and the optimizer runs.


@lru_cache(maxsize=4096)
def _cuts(weights: tuple[float, ...], starts: tuple[int, ...], stages: int) -> tuple[int, ...]:
    return partition(weights, stages, allowed=starts).cuts
