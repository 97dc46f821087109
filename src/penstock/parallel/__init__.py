"""Around the pipeline: replicas of it (data parallel, plain or sharded), and tensors spread over ranks."""

from __future__ import annotations

from penstock.parallel.mesh import mesh
from penstock.parallel.sampler import ReplicaSampler

__all__ = ["ReplicaSampler", "mesh"]
