"""Models of transformers, recognised without importing it: the inputs that they get, and where they come from."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from torch import nn


def default_inputs(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that a pipeline gives a model unless the user does.

    Training needs no key-value cache, and one would carry tensors from layer to layer past all that can be seen.

    Some of transformers' models take `use_cache` only among their further keyword arguments.
    """
    if "use_cache" in kwargs:
        return {}
    parameters = inspect.signature(model.forward).parameters
    theirs = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    caches = theirs and passes_on and _caches(getattr(model, "config", None))
    return {"use_cache": False} if "use_cache" in parameters or caches else {}


def _caches(config: Any) -> bool:
    """Whether a model, or the language model in it, would make a cache by itself."""
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(config, "use_cache", False) or getattr(inner, "use_cache", False))


def origin_of(model: Any) -> dict[str, Any] | None:
    """What `config.json` would say, which a checkpoint wants to know; None for other models."""
    config = getattr(model, "config", None)
    write = getattr(config, "to_json_string", None)
    if not callable(write) or not isinstance(getattr(config, "model_type", None), str):
        return None
    found = json.loads(write())
    found["architectures"] = [type(model).__name__]
    return {"library": "transformers", "config": found}
