"""Whether a folder has weights that can be read; without loading torch."""

from __future__ import annotations

import os
from pathlib import Path

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def has_weights(folder: str | os.PathLike[str]) -> bool:
    return any(Path(folder, name).is_file() for name in (WEIGHTS, INDEX))


def no_weights(folder: Path) -> str:
    """Make the error about a folder without safetensors, with the way to make them."""
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{folder} has its weights in {pickled[0]}, and only safetensors are read, since loading a .bin file can "
            f'run code; where you trust it, convert it once: AutoModelForCausalLM.from_pretrained("{folder}")'
            f'.save_pretrained("{folder}", safe_serialization=True)'
        )
    return (
        f"{folder} has neither {WEIGHTS} nor {INDEX}, so there are no weights to load; write them by "
        f'save_pretrained(), or choose random ones with model.init = "random"'
    )
