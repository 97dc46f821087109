"""What is done to the parameter groups of torch's FSDP2 between its own hooks, for `sharded` and `wrapped_stages`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def add_up(groups: Iterable[Any]) -> None:
    """After a backward: low-precision gradients are added up in the precision that they are reduced in."""
    for group in groups:
        for each in group.fsdp_params:
            if hasattr(each, "_unsharded_param"):
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()


def forget_gradients(groups: Iterable[Any]) -> None:
    """Drop the gradients of complete parameters, which have not been reduced."""
    for group in groups:
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
