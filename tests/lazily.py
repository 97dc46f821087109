"""Helpers that load when they are first used: every worker collects every test, and only one of them runs these."""

from __future__ import annotations

import importlib
from typing import Any


class _Helper:
    """Stands for a module. pytest asks all that it collects for its class: importlib's lazy modules would load then."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazily(name: str) -> Any:
    """The helper of this name, in tests/, which imports what takes seconds to load."""
    return _Helper(name)
