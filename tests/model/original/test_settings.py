"""What is set on modules from outside is noticed once, by module and name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.model.original.settings import ModuleSettings, value_key


def changed(settings: ModuleSettings, model: nn.Module) -> list[tuple[str, str]]:
    names = {module: name for name, module in model.named_modules()}
    return [(names[module], name) for module, name in settings.take_changes()]


def test_modes_attributes_and_what_was_removed_are_noticed_once() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
    model[0].note = "to be removed"  # type: ignore[assignment]
    settings = ModuleSettings(model.modules())
    assert changed(settings, model) == []
    model[0].p = 0.2  # type: ignore[assignment]
    model[1].eval()
    del model[0].note
    assert sorted(changed(settings, model)) == [("0", "note"), ("0", "p"), ("1", "training")]
    assert changed(settings, model) == []


def test_what_is_inside_of_lists_counts_for_copied_modules_only() -> None:
    plain, copied = nn.Identity(), nn.Identity()
    model: nn.Module = nn.Sequential(plain, copied)
    plain.scales, copied.scales = [1.0], {"a": [1.0]}  # type: ignore[assignment]
    settings = ModuleSettings(model.modules(), [copied])
    plain.scales.append(2.0)  # type: ignore[operator]
    copied.scales["a"].append(2.0)  # type: ignore[index]
    assert changed(settings, model) == [("1", "scales")]


def test_what_stages_put_is_no_change_of_the_users() -> None:
    model = nn.Linear(2, 2)
    settings = ModuleSettings([model])
    settings.put(model, "calls", 1)
    assert settings.take_changes() == []
    assert settings.is_unchanged(model, "calls")


def test_keys_are_equal_for_equal_plain_values_and_go_by_identity_for_others() -> None:
    kept: list[Any] = []
    assert value_key([1, {"a": (2.0, None)}], kept) == value_key([1, {"a": (2.0, None)}], kept)
    assert value_key([1], kept) != value_key((1,), kept)
    assert value_key(1, kept) != value_key(True, kept)
    one, other = torch.ones(1), torch.ones(1)
    assert value_key(one, kept) == value_key(one, kept) != value_key(other, kept)
    assert any(each is other for each in kept)  # an id counts for as long as its object lives
