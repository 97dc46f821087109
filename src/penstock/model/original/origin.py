"""Where a model came from, as far as a checkpoint wants to know: the configuration of a transformers model."""

from __future__ import annotations

import json
from typing import Any


def origin_of(model: Any) -> dict[str, Any] | None:
    """What `config.json` would say, for a model of transformers; else None. Recognised without importing it."""
    config = getattr(model, "config", None)
    write = getattr(config, "to_json_string", None)
    if not callable(write) or not isinstance(getattr(config, "model_type", None), str):
        return None
    found = json.loads(write())
    found["architectures"] = [type(model).__name__]
    return {"library": "transformers", "config": found}
