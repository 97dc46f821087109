"""Tensors that transformers keeps otherwise in files than in models: renamed, put together or taken apart.

The experts of a mixture are one tensor in the model and one per expert in the folder that `save_pretrained` writes;
`from_pretrained` converts while it loads. The rules are transformers' own, and they are applied here to the names of
all tensors and to the values of those that a rank asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

Read = Callable[[str], Tensor]


@dataclass
class Conversion:
    """How some tensors of a model are made of stored ones."""

    model: Any
    rule: Any  # transformers' WeightConverter
    target: str  # the first tensor that it makes
    sources: list[tuple[str, str]] = field(default_factory=list)  # the pattern that a stored name has matched, the name

    def make(self, read: Read) -> dict[str, Tensor]:
        """Make the tensors by their names in the model; `read` returns a stored one by its name."""
        rule = deepcopy(self.rule)  # The rule collects what it is given.
        for pattern, name in self.sources:
            rule.add_tensor(self.target, name, pattern, partial(read, name))
        made = rule.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def convert_names(
    model: nn.Module, state: Mapping[str, Tensor], stored: Collection[str]
) -> tuple[dict[str, str], list[Conversion]]:
    """Find where the tensors of a model are: stored names by those in the model, and what has to be converted.

    Stored names that the model has no use for are in neither. A model that is not of transformers has its own names.
    """
    rules = _rules(model)
    if rules is None:
        return {name: name for name in stored if name in state}, []
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = getattr(model, "base_model_prefix", ""), dict(state)
    places: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            continue
        if pattern is None:
            places[target] = name
        else:
            made = conversions.setdefault(target, Conversion(model, by_pattern[pattern], target))
            made.sources.append((pattern, name))
    return places, list(conversions.values())


def _rules(model: nn.Module) -> list[Any] | None:
    """Return what transformers does to a folder of such a model when it loads it; None for other models."""
    if not hasattr(model, "base_model_prefix"):
        return None
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else None
