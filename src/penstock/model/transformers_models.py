"""Models of transformers and peft, recognised without importing these: their inputs, and where they come from."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

ADAPTER = "default"  # the name that peft gives an adapter when nobody chooses one


def default_inputs(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs that a pipeline gives a model unless the user does.

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
    """Return whether a model, or the language model in it, would make a cache by itself."""
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(config, "use_cache", False) or getattr(inner, "use_cache", False))


def origin_of(model: Any) -> dict[str, Any] | None:
    """Return what the JSON files beside the weights would hold, for a model of transformers or one with adapters; else
    None.

    Both are recognised without importing their libraries.
    """
    found: dict[str, Any] = {}
    config = _document(getattr(model, "config", None))
    if config is not None and isinstance(model.config.model_type, str):
        found |= {"library": "transformers", "config": config | {"architectures": [type(model).__name__]}}
        generation = _document(getattr(model, "generation_config", None))
        if generation is not None:
            found["generation_config"] = generation
        if isinstance(getattr(model, "name_or_path", None), str) and model.name_or_path:
            found["folder"] = model.name_or_path
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and hasattr(adapters.get(ADAPTER), "to_dict"):
        settings = json.loads(json.dumps(adapters[ADAPTER].to_dict(), default=_plain))
        found["adapter"] = settings | {"inference_mode": True}
    return found or None


def _document(config: Any) -> dict[str, Any] | None:
    write = getattr(config, "to_json_string", None)
    if not callable(write) or not (hasattr(config, "model_type") or type(config).__name__ == "GenerationConfig"):
        return None
    found: dict[str, Any] = json.loads(write())
    return found


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
