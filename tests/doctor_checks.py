"""Checks that go wrong in every way in which a rank can, for the tests of `penstock doctor`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from torch import Tensor, nn

from penstock.tools.doctor import checks
from penstock.tools.doctor.ranks import Place


def answer(place: Place, factor: int) -> dict[str, Any]:
    return {"value": factor * place.rank}


def write_and_raise(place: Place) -> dict[str, Any]:
    if place.rank == 1:
        os.write(2, b"a library's last words\n")
        raise ValueError("the product has 3 rows\nand 4 were expected")
    return {}


def die(place: Place) -> dict[str, Any]:
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {}


def hang(place: Place) -> dict[str, Any]:
    while place.rank == 0:
        time.sleep(0.1)
    return {}


def lose_a_microbatch(place: Place, family: str) -> dict[str, Any]:
    """Compare with the plain loop on a machine whose ranks leave one microbatch out of the gradients."""
    forward, calls = checks.ResidualLayer.forward, [0]

    def wrong(block: nn.Module, x: Tensor) -> Tensor:
        calls[0] += 1
        made = forward(block, x)
        return made.detach() + 0.0 * block.norm.weight.sum() if calls[0] == 2 else made

    checks.ResidualLayer.forward = wrong  # type: ignore[method-assign]
    try:
        return checks.compare_with_plain_loop(place, family)
    finally:
        checks.ResidualLayer.forward = forward  # type: ignore[method-assign]
