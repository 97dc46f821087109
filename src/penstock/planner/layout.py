"""How a model can be laid out on a cluster: the sizes of the axes, what stands where, and what links then take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, isqrt

from penstock.planner.cluster import Cluster, Interconnect
from penstock.tools.train.config.settings import TrainConfig


@dataclass(frozen=True)
class MeshLayout:
    """The axes of a run: pp x dp x cp x tp processes.

    Attributes:
        pp: Ranks per pipeline.
        dp: Replicas of the pipeline.
        tp: Processes that share the tensors of a stage.
        cp: Processes that share the tokens of a row. Priced to compare with others' runs; Penstock has no such axis.
        sharded: Whether replicas hold a part of the parameters each (`fsdp`), or all of them (`ddp`).
        inner: The axis whose neighbours stand closest after those of tp: `"dp"` or `"pp"`.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    sharded: bool = False
    inner: str = "dp"

    @classmethod
    def of(cls, config: TrainConfig) -> MeshLayout:
        """Return the layout that a configuration runs."""
        mesh = config.mesh
        sharded = mesh.replicate == "fsdp" and mesh.replicas > 1
        return cls(config.pipeline.ranks, mesh.replicas, mesh.tp, sharded=sharded, inner=mesh.inner)

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.pp * self.dp * self.tp * self.cp

    def __str__(self) -> str:
        parts = [f"pp {self.pp}", f"dp {self.dp}" + (" sharded" if self.sharded else "")]
        parts += [f"{name} {size}" for name, size in (("cp", self.cp), ("tp", self.tp)) if size > 1]
        return " x ".join(parts) + (", pp inside hosts" if self.inner == "pp" else "")

    def stride(self, axis: str) -> int:
        """Return how many devices apart neighbours along an axis are."""
        if axis == "tp":
            return 1
        if axis == "cp":
            return self.tp
        near = self.tp * self.cp
        other = self.dp if axis == "pp" else self.pp
        return near if axis == self.inner else near * other

    def size(self, axis: str) -> int:
        """Return how many ranks stand along an axis."""
        return int(getattr(self, axis))

    def per_host(self, axis: str, devices: int) -> int:
        """Return how many of the ranks along an axis are on one host."""
        return max(1, gcd(self.size(axis), devices // self.stride(axis))) if self.stride(axis) < devices else 1

    def wire(self, axis: str, cluster: Cluster) -> Interconnect:
        """Return what connects neighbours along an axis at the slowest place."""
        inside = self.per_host(axis, cluster.devices) == self.size(axis)
        return cluster.inside if inside else cluster.between


def all_reduce(size: float, layout: MeshLayout, axis: str, cluster: Cluster) -> float:
    """Time a sum of `size` bytes over an axis: within hosts, then between them each device with its part."""
    return 2 * gather(size, layout, axis, cluster)


def gather(size: float, layout: MeshLayout, axis: str, cluster: Cluster) -> float:
    """Time the gathering of `size` bytes, in all, over an axis; to scatter sums of them takes as long."""
    ranks, near = layout.size(axis), layout.per_host(axis, cluster.devices)
    if ranks == 1 or not size:
        return 0.0
    far = ranks // near
    seconds = 0.0
    if near > 1:
        seconds += size * (near - 1) / near / cluster.inside.bandwidth + (near - 1) * cluster.inside.latency
    if far > 1:
        seconds += size / near * (far - 1) / far / cluster.between.bandwidth + (far - 1) * cluster.between.latency
    return seconds


def layouts(cluster: Cluster, *, most_stages: int, heads: int, batch: int, divisible: bool) -> Iterator[MeshLayout]:
    """Yield every way to use all devices: pp x dp x tp, replicas plain and sharded, and which axis is inside hosts."""
    world = cluster.world
    for tp in _divisors(world):
        if tp > 1 and (not divisible or tp > cluster.devices or (heads and heads % tp)):
            continue
        for pp in _divisors(world // tp):
            dp = world // tp // pp
            if pp > most_stages or batch % dp:
                continue
            for sharded in (False, True) if dp > 1 and cluster.software.sharding else (False,):
                yield MeshLayout(pp, dp, tp, sharded=sharded)
                other = MeshLayout(pp, dp, tp, sharded=sharded, inner="pp")
                if (
                    cluster.software.name == "penstock"  # others have one order
                    and pp > 1
                    and dp > 1
                    and (
                        other.per_host("pp", cluster.devices) > 1
                        or MeshLayout(pp, dp, tp).per_host("dp", cluster.devices) > 1
                    )
                ):
                    yield other


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
