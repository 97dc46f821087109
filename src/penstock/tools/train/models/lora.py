"""Low-rank adapters for the training command, put into the model by peft before it is cut.

peft replaces layers inside the model, so that the pipeline sees ordinary modules. Where adapters begin depends on the
seed and on the name of the parameter, and not on the order in which ranks make them.
"""

from __future__ import annotations

import difflib
import math
import re
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.files.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, is_adapter, name_in_adapter_file
from penstock.checkpoint.files.pretrained import PretrainedFolder
from penstock.errors import UsageError
from penstock.model.lazy import is_lazy, lazy
from penstock.reading import NONSENSE, check_folder, read_json
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE

OTHER_MODEL = f"this adapter was made for another model: its {ADAPTER_CONFIG} names which"
NAME = re.compile(r"([\w.^$-]|\\\.)*")  # A layer's name, as peft writes it.
LINEAR = (nn.Linear.__name__, "Conv1D")  # transformers' own, of GPT-2, keeps its weight the other way


def has_adapters(config: TrainConfig) -> bool:
    """Return whether the configuration asks for adapters."""
    return config.lora.rank > 0 or config.lora.adapter is not None


def add_adapters(config: TrainConfig, model: nn.Module) -> nn.Module:
    """Put adapters into the model; everything else is frozen from here on."""
    try:
        from peft import inject_adapter_in_model  # optional, and slow to load
    except ImportError:
        raise UsageError("lora needs the peft package: pip install 'penstock[lora]'") from None
    settings = _settings(config)
    without_values = is_lazy(model)
    try:
        with lazy() if without_values else nullcontext():
            inject_adapter_in_model(settings, model)
    except (*NONSENSE, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if config.lora.adapter is not None:
            raise UsageError(f"lora.adapter: {config.lora.adapter} cannot be put into the model: {first}") from None
        raise UsageError(f"lora.targets: {unmatched_target(config, model) or first}") from None
    if config.lora.adapter is not None:
        _check_all_placed(config.lora.adapter, model)
    if not without_values:
        fill = adapter_values(config)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                fill(name, parameter)
    return model


def unmatched_target(config: TrainConfig, model: nn.Module) -> str:
    """Describe a target that no layer's name ends in, with near names; empty where each target has a layer."""
    names = [name for name, _ in model.named_modules() if name]
    linear = [name for name, layer in model.named_modules() if type(layer).__name__ in LINEAR]
    layers = sorted({name.rpartition(".")[2] for name in linear})
    if not config.lora.targets:
        named = ", ".join(f'"{name}"' for name in layers)
        return f'peft knows no layers for this model by itself; name some, of {named}, or ["all-linear"]'
    for target in config.lora.targets:
        if target != "all-linear" and not any(f".{name}".endswith(f".{target}") for name in names):
            near = difflib.get_close_matches(target, layers, cutoff=0.4)
            named = ", ".join(dict.fromkeys([*near, *layers]))
            return f"{target!r} is the name of no layer of the model; its linear layers are {named}"
    return ""


def adapter_values(config: TrainConfig) -> Callable[[str, Tensor], Any]:
    """Return what fills the parameters of adapters: the folder that they start from, or peft's usual beginning."""
    if config.lora.adapter is not None:
        return partial(_read_adapter, PretrainedFolder(config.lora.adapter, ADAPTER_WEIGHTS))
    return lambda name, tensor: begin_adapter(config.seed, name, tensor)


def _read_adapter(weights: PretrainedFolder, name: str, tensor: Tensor) -> None:
    try:
        weights(name_in_adapter_file(name), tensor)
    except UsageError as error:
        raise UsageError(f"lora.adapter: {error}; {OTHER_MODEL}") from None


def _check_all_placed(folder: str, model: nn.Module) -> None:
    placed = {name_in_adapter_file(name) for name, _ in model.named_parameters() if is_adapter(name)}
    unplaced = [name for name in PretrainedFolder(folder, ADAPTER_WEIGHTS).tensors if name not in placed]
    if unplaced:
        raise UsageError(
            f"lora.adapter: {folder} has tensors for layers that the model has not ({len(unplaced)} of them, such as "
            f"{unplaced[0]}); {OTHER_MODEL}"
        )


def begin_adapter(seed: int, name: str, tensor: Tensor) -> None:
    """Fill in the beginning of an adapter: its second factor at zero, so that the model is as it was."""
    with torch.no_grad():
        if "lora_B" in name or "lora_embedding_A" in name:
            tensor.zero_()
            return
        own = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (seed << 32))
        values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        if "lora_embedding_B" in name:
            nn.init.normal_(values, generator=own)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=own)
        tensor.copy_(values)


def _settings(config: TrainConfig) -> Any:
    from peft import LoraConfig, PeftConfig

    options = config.lora
    if options.adapter is not None:
        path = Path(options.adapter)
        if not (path / ADAPTER_CONFIG).is_file():
            raise UsageError(f"lora.adapter: {path} has no {ADAPTER_CONFIG}; peft's save_pretrained() writes one")
        check_folder(path)
        read_json(path / ADAPTER_CONFIG)
        try:
            found = PeftConfig.from_pretrained(str(path))
        except NONSENSE as error:
            raise UsageError(f"lora.adapter: {path} cannot be read: {error}") from None
        if not isinstance(found, LoraConfig):
            raise UsageError(f"lora.adapter: {path} is of type {found.peft_type}; only LORA can be trained here")
        if found.modules_to_save or found.bias != "none":
            raise UsageError(
                f"lora.adapter: {path} also trains whole modules or biases (modules_to_save, bias), and here only "
                f"low-rank factors are; make it without these"
            )
        if options.rank not in (0, found.r):
            raise UsageError(
                f"lora.rank is {options.rank}, and the adapter in {path} has {found.r}; leave lora.rank out"
            )
        if found.layer_replication:
            raise UsageError(f"lora.adapter: {path} repeats layers of its model (layer_replication), as none here may")
        patterns = [*(found.rank_pattern or ()), *(found.alpha_pattern or ()), *(found.target_parameters or ())]
        patterns += [each for each in (found.exclude_modules, found.layers_pattern) if isinstance(each, str)]
        if odd := [each for each in patterns if not NAME.fullmatch(str(each))]:
            raise UsageError(f"lora.adapter: {path} has {odd[0]!r}, a pattern that may take for ever; name the layers")
        if isinstance(found.target_modules, str) and found.target_modules != "all-linear":  # may take for ever, too
            stored = PretrainedFolder(path, ADAPTER_WEIGHTS).tensors
            found.target_modules = sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in stored})
        found.inference_mode = False
        return found
    source = config.model.source
    targets: Any = options.targets or None
    return LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank if options.alpha is None else options.alpha,  # type: ignore[arg-type]
        lora_dropout=options.dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=source.removeprefix(HUGGINGFACE) if source.startswith(HUGGINGFACE) else None,
    )
