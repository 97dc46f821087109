"""`DeferredBatchNorm`: torchgpipe's layer, on the statistics that Penstock pools.

In a pipeline it is a deferred batch norm like any other: its stage notes the statistics of each microbatch and commits
them when the batch is through. Outside of one, as in a loop over `x.chunk(n)`, it counts its own calls, and commits
after `chunks` of them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.compat.torchgpipe.errors import WrongTypeError
from penstock.runtime.state.batch_norm import Deferred, Note, update_statistics
from penstock.runtime.state.phase import NOW

__all__ = ["DeferredBatchNorm"]

Module = TypeVar("Module", bound=nn.Module)


class DeferredBatchNorm(Deferred):
    """A batch norm whose running statistics move once per batch of `chunks` microbatches.

    `sum` and `sum_squares` are in its state for the sake of checkpoints that torchgpipe has written, or is to read:
    between two batches, which is when a model is saved, they are zero.

    Args:
        num_features: As of `nn.BatchNorm2d`.
        eps: As of `nn.BatchNorm2d`.
        momentum: As of `nn.BatchNorm2d`.
        affine: As of `nn.BatchNorm2d`.
        chunks: Microbatches per batch.
    """

    plain = _BatchNorm
    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.register_buffer("sum", torch.zeros_like(self.running_mean))  # type: ignore[arg-type]
        self.register_buffer("sum_squares", torch.zeros_like(self.running_var))  # type: ignore[arg-type]
        self.chunks = chunks
        self._notes: list[Note] = []  # Notes of the batch that goes through, outside of a pipeline.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Module.__reduce_ex__(self, protocol)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise WrongTypeError(f"a batch norm takes inputs of at least 2 dimensions; this one has {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the microbatch; in eval mode, by the running statistics.

        Args:
            input: The input of the layer.
        """
        if NOW.phase is not None or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        assert self.running_mean is not None
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_mean)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        self._notes.append((input.numel() // input.shape[1], mean, variance))
        if len(self._notes) >= self.chunks:
            notes, self._notes = self._notes, []
            update_statistics(self, notes)
        return output

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module:
        """Replace the batch norm layers of a module by deferred ones, which share their parameters and statistics.

        Args:
            module: The module to convert, which is also returned.
            chunks: Microbatches per batch.
        """
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            return cls._converted(module, chunks)  # type: ignore[return-value]
        for name, child in module.named_children():
            module.add_module(name, cls.convert_deferred_batch_norm(child, chunks))
        return module

    @classmethod
    def _converted(cls, norm: _BatchNorm, chunks: int) -> DeferredBatchNorm:
        assert norm.running_mean is not None
        made = cls(norm.num_features, norm.eps, norm.momentum, norm.affine, chunks).to(norm.running_mean)
        made._parameters.update(norm._parameters)
        made._buffers.update({name: norm._buffers[name] for name in ("running_mean", "running_var")})
        made._buffers["num_batches_tracked"] = norm._buffers["num_batches_tracked"]
        return made.train(norm.training)
