"""What a plan is made for: hosts, their devices, the links between these, and the program that trains on them.

A cluster is a TOML file, or is measured (`here`). Bandwidths are those that programs reach, not those of data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from penstock.errors import UsageError
from penstock.reading import read_toml
from penstock.tools.train.config.read import checked
from penstock.tools.train.config.settings import key


@dataclass(frozen=True)
class Device:
    """One GPU, or the cores that one rank has."""

    memory: float = key(80e9, "bytes that a rank may use", above=0)
    headroom: float = key(
        0.1, "share of the memory that plans leave free: allocators leave gaps, and predictions err", least=0, most=0.9
    )
    peak: float = key(312e12, "floating-point operations per second at most, in the precision of the run", least=1)
    efficiency: float = key(0.6, "share of the peak that large products reach", above=0, most=1)
    thin: float = key(
        0, "the smaller dimension of a weight matrix at which products reach half of that efficiency", least=0
    )
    attention: float = key(0.7, "share of that efficiency that attention as one kernel reaches", above=0, most=1)
    bandwidth: float = key(1.3e12, "bytes per second between a device and its memory, as operations reach it", least=1)
    holds_checkpoints: bool = key(False, "whether checkpoints are written from a copy in this memory, as on a CPU")
    reserved: float = key(2e9, "bytes that the process takes by itself: libraries, kernels, fragments", least=0)


@dataclass(frozen=True)
class Interconnect:
    """What connects two devices: what one device sends, and receives, per second."""

    bandwidth: float = key(25e9, "bytes per second, per device and direction", above=0)
    latency: float = key(10e-6, "seconds of a message without content", least=0)


@dataclass(frozen=True)
class Software:
    """The program that trains. Others than Penstock are priced, to compare with published runs."""

    name: Literal["penstock", "megatron"] = key(
        "penstock",
        "penstock: 32-bit weights under autocast; megatron: 16-bit weights with 32-bit copies, gradients and states",
    )
    gradient_bytes: int = key(
        2,
        "of megatron: bytes of a gradient as it is added up and reduced; of 2, updates need a copy of 4",
        least=2,
        most=4,
    )
    fused_attention: bool = key(True, "whether attention is one kernel that keeps no scores")
    overlapped: bool = key(
        True, "whether ranks compute while messages between stages, and gradients between replicas, are on their way"
    )
    whole_rounds: bool = key(
        False, "whether interleaved schedules take multiples of the pipeline's ranks as microbatches only"
    )
    sharding: bool = key(True, "whether replicas can hold a part of the parameters each")
    sequence_parallel: bool = key(False, "whether what tensor parallelism leaves whole is divided along the sequence")

    @property
    def master_weights(self) -> bool:
        return self.name == "megatron"


@dataclass(frozen=True)
class Cluster:
    """Hosts with devices, all alike."""

    name: str = key("cluster", "what it is called in tables")
    hosts: int = key(1, "machines", least=1, most=100_000)
    devices: int = key(8, "devices per host", least=1, most=1024)
    error: float = key(0.1, "how far predictions may be off, as a share: the error bar", least=0, most=1)
    device: Device = field(default_factory=Device)
    inside: Interconnect = field(default_factory=lambda: Interconnect(bandwidth=235e9, latency=8e-6))
    between: Interconnect = field(default_factory=Interconnect)
    software: Software = field(default_factory=Software)

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may fill: its memory without the headroom."""
        return self.device.memory * (1 - self.device.headroom)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster from a TOML file."""
        try:
            document = read_toml(path)
        except FileNotFoundError:
            raise UsageError(f"there is no cluster {path}; examples/clusters/ has some to start from") from None
        found = checked(cls, document, str(path))
        if found.device.reserved >= found.room:
            raise UsageError(
                f"{path}: device.reserved is {found.device.reserved:g} bytes of the {found.room:g} that a plan may "
                f"fill (device.memory without device.headroom), so nothing is left for a model"
            )
        return found

    def at(self, efficiency: float) -> Cluster:
        """Return the same with another efficiency."""
        return replace(self, device=replace(self.device, efficiency=efficiency))
