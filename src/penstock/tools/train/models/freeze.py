"""Parameters that a run does not train, chosen by their names before the model is cut.

A frozen parameter has no gradient, no optimizer state and no average.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from penstock.errors import UsageError
from penstock.runtime.optim.groups import unmatched

TRAIN = "!"  # begins a pattern of parameters that are trained after all


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name a pattern matches; of several patterns that match, the last one counts."""
    if not patterns:
        return
    every = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in every]
    for pattern in patterns:
        plain = pattern.removeprefix(TRAIN)
        if not any(fnmatchcase(name, plain) for name in names):
            raise UsageError(f"training.freeze: {unmatched(plain, names, {})}")
    for name, parameter in every:
        last = next((each for each in reversed(patterns) if fnmatchcase(name, each.removeprefix(TRAIN))), None)
        if last is not None:
            parameter.requires_grad_(last.startswith(TRAIN))
    if not any(parameter.requires_grad for _, parameter in every):
        raise UsageError(
            f"training.freeze: {', '.join(patterns)} freezes all {len(names)} parameters of the model, so that nothing "
            f'is left to train; add a pattern of those to train, such as "!{names[-1]}"'
        )
