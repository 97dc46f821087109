"""Where a model came from, as far as files for other libraries need it: configurations of transformers and peft."""

from __future__ import annotations

import json
from typing import Any

ADAPTER = "default"  # the name that peft gives an adapter when nobody chooses one


def origin_of(model: Any) -> dict[str, Any] | None:
    """What the JSON files beside the weights would say, for a model of transformers or one with adapters; else None.

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
