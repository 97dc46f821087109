"""accelerate's part of a Trainer, with batches that go by replica and not by process.

An Accelerator gives each process its own rows and joins what all processes found. The ranks of one pipeline must see
the same rows, and have one result between them. So data is divided, and results are joined, along the mesh's dp axis
only; without one, every process reads the same batches and nothing is joined.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor

from penstock.parallel.mesh import Axes


class ReplicaAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An Accelerator whose data-parallel processes are the replicas of a pipeline."""

    axes = Axes()

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Give every rank of a pipeline the batches of its replica."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.axes.size("dp"),
            process_index=self.axes.index("dp"),
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,  # every rank reads; else process 0 would cut each batch into one part per process
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Join the tensors of all replicas, one after the other."""
        if self.axes.size("dp") == 1:
            return tensor
        group = self.axes.mesh.get_group("dp")

        def join(own: Tensor) -> Tensor:
            own = (own[None] if own.dim() == 0 else own).contiguous()
            found = [torch.empty_like(own) for _ in range(self.axes.size("dp"))]
            dist.all_gather(found, own, group=group)
            return torch.cat(found)

        return recursively_apply(join, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors along `dim` to the longest of any replica."""
        if self.axes.size("dp") == 1:
            return tensor

        def pad(own: Tensor) -> Tensor:
            if dim >= own.dim():
                return own
            most = int(self.gather(torch.tensor(own.shape[dim], device=own.device)).max())
            shape = list(own.shape)
            shape[dim] = most - shape[dim]
            filler = own.new_full(shape, pad_index)
            return torch.cat([filler, own] if pad_first else [own, filler], dim)

        return recursively_apply(pad, tensor, error_on_other_type=True)
