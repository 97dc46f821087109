"""How a model is cut into stages, beyond where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.model.balance.profile import OPTIMIZERS
from penstock.rules import ArgumentRule, check_rules, choice, is_count, is_number

METHODS = ("auto", "position", "replay", "graph")


def _are_skips(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(is_count, pair)) for pair in value
    )


RULES = {
    "method": choice(*METHODS),
    "skips": ArgumentRule(_are_skips, "pass pairs of stages, such as [(0, 3)]"),
    "speeds": ArgumentRule(
        lambda value: isinstance(value, (list, tuple)) and all(map(is_number, value)),
        "pass one number for each rank, such as [1.0, 0.5]",
    ),
    "optimizer": choice(*OPTIMIZERS),
}


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """How the model is cut, beyond where: `Pipeline(..., cut_options=CutOptions(method="graph"))`.

    Args:
        method: `"position"` for lists and `nn.Sequential`; `"replay"`, which runs the model's own forward on every
            stage; `"graph"`, which cuts what `torch.export` captures; `"auto"`, the first of these that applies.
        skips: Pairs of stages of a list, where the first passes a value straight to the second (see `Routed`).
        speeds: How fast each rank is, for `balance=`: 0.5 takes twice as long.
        optimizer: The optimizer whose state counts as memory for `balance="memory"`.
    """

    method: str = "auto"
    skips: Iterable[tuple[int, int]] = ()
    speeds: Sequence[float] | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        check_rules(vars(self), RULES, "CutOptions")
