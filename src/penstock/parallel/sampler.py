"""Each replica loads only its own data.

torch's DistributedSampler goes by the rank in the world, which on a mesh is the wrong number: the ranks of one
pipeline, and of one tensor, must all see the same rows. This one goes by the place on the dp axis. It never repeats a
row to make the replicas even: batches of unequal size weigh by what is in them, so there is no need to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from penstock.errors import UsageError
from penstock.parallel.mesh import Axes


class ReplicaSampler(Sampler[list[int]]):
    """Batches of row numbers for this replica: `DataLoader(data, batch_sampler=ReplicaSampler(data, 32, mesh))`.

    Every replica gets the same number of batches, so all take the same number of steps.

    Args:
        data: The data set, or anything with a length.
        batch: Rows per step over all replicas, divided as evenly as possible.
        mesh: The mesh with an axis `dp`, which says which replica this is.
        shuffle: Whether rows come in a new order in each epoch; see `set_epoch`.
        seed: Where the shuffling starts.
        drop_last: Whether a last, smaller batch is dropped.
        least: The fewest rows per replica for a last batch to count; a pipeline needs one per microbatch.
        replica: The number of this replica, without a mesh.
        replicas: The number of replicas, without a mesh.
    """

    def __init__(
        self,
        data: Sized,
        batch: int,
        mesh: Any = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        least: int = 1,
        replica: int | None = None,
        replicas: int | None = None,
    ) -> None:
        axes = Axes(mesh)
        self.replicas = axes.size("dp") if replicas is None else replicas
        self.replica = axes.index("dp") if replica is None else replica
        if not 0 <= self.replica < self.replicas:
            raise UsageError(f"replica={self.replica}: there are {self.replicas}, counted from 0")
        if least < 1 or batch < self.replicas * least:
            raise UsageError(
                f"batch={batch} rows for {self.replicas} replicas with at least {least} each; pass a batch of at "
                f"least {self.replicas * max(least, 1)}"
            )
        self.data, self.batch, self.shuffle, self.seed = data, batch, shuffle, seed
        self.drop_last, self.least = drop_last, least
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch, the same on all ranks.

        Args:
            epoch: The number of the epoch.
        """
        self.epoch = epoch

    def __len__(self) -> int:
        whole, left = divmod(len(self.data), self.batch)
        return whole + (not self.drop_last and left >= self.replicas * self.least)

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self.data)
        if self.shuffle:
            made = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=made, device="cpu").tolist()
        else:
            order = list(range(count))
        for number in range(len(self)):
            rows = order[number * self.batch : (number + 1) * self.batch]
            size, larger = divmod(len(rows), self.replicas)
            first = self.replica * size + min(self.replica, larger)
            yield rows[first : first + size + (self.replica < larger)]
