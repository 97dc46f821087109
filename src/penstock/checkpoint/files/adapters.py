"""Low-rank adapters as the peft library names and stores them.

peft puts a layer of its own in the place of `q_proj`: the old one becomes `q_proj.base_layer`, and `q_proj.lora_A` and
`q_proj.lora_B` stand beside it, each by the name of an adapter. Its files know neither the name of the adapter nor
`base_layer`. What is here is that translation, and the sum of a weight and its adapter, one tensor at a time; peft
itself is not needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"  # the name that peft gives an adapter when nobody chooses one
# Every name in peft's files begins so.
PREFIX = "base_model.model."
BASE = ".base_layer."
PAIRS = (("lora_A", "lora_B", ".weight"), ("lora_embedding_A", "lora_embedding_B", ""))


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def name_in_adapter_file(name: str) -> str:
    """Return the name that peft's file has for a parameter of an adapter."""
    return PREFIX + name.replace(f".{ADAPTER}.", ".").removesuffix(f".{ADAPTER}")


def name_without_adapter(name: str) -> str:
    """Return the name that a parameter beside adapters had before they were put in."""
    return name.replace(BASE, ".")


def stored_names(names: Iterable[str], merge: bool) -> dict[str, str]:
    """Return what each tensor of a model with adapters is called in the files.

    Either the adapters alone, in peft's format, or (`merge`) the model as it was without them.
    """
    if merge:
        return {name: name_without_adapter(name) for name in names if not is_adapter(name)}
    return {name: name_in_adapter_file(name) for name in names if is_adapter(name)}


def merged(name: str, value: Tensor, get: Callable[[str], Tensor | None], config: Mapping[str, Any]) -> Tensor:
    """Return a weight with its adapter added to it; other tensors as they are.

    `get` finds a tensor by its name in the model; `config` is what peft's adapter_config.json says.
    """
    place = name.rpartition(BASE)[0]
    if not place or not name.endswith(".weight"):
        return value
    for first, second, end in PAIRS:
        down, up = (get(f"{place}.{which}.{ADAPTER}{end}") for which in (first, second))
        if down is not None and up is not None:
            added = up.float() @ down.float() * scale_of(place, down.shape[0], config)
            if not end or config.get("fan_in_fan_out"):  # embeddings, and layers that keep their weight the other way
                added = added.T
            return (value.float() + added).to(value.dtype)
    return value


def scale_of(place: str, rank: int, config: Mapping[str, Any]) -> float:
    alpha = float(config["lora_alpha"])
    odd = [name for name in ("alpha_pattern", "rank_pattern", "use_dora") if config.get(name)]
    if odd:
        raise UsageError(
            f"the adapter of {place} has {odd[0]}, which is not merged here; save the adapter by itself, and merge it "
            f"with peft: PeftModel.from_pretrained(...).merge_and_unload()"
        )
    return float(alpha / rank**0.5) if config.get("use_rslora") else alpha / rank
