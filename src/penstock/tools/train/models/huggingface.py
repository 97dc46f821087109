"""Models of transformers for the training command: from a folder with weights, or from a configuration.

A folder's weights are not read when the model is built. The model is built without memory for its parameters, the
pipeline is cut from its shapes, and then each rank reads the tensors of its own stages straight from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.checkpoint.files.adapters import is_adapter
from penstock.checkpoint.files.pretrained import PretrainedFolder
from penstock.checkpoint.files.weights import has_weights
from penstock.errors import UsageError
from penstock.model.lazy import is_lazy, lazy
from penstock.reading import NONSENSE, check_folder, read_json
from penstock.tools.train.config.paths import no_configuration
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE
from penstock.tools.train.models.lora import adapter_values, has_adapters

ONE_BY_ONE = ("layer", "layers", "experts", "labels")  # how keys end that count what is built, memory or not
MOST_BUILT = 10_000
# By attention, the package without which transformers takes a repository's.
FLASH = {f"flash_attention_{version}": name for version, name in ((2, "flash_attn"), (3, "flash_attn_interface"))}
FLASH["flash_attention_4"] = "flash_attn"
NO_FOLDER_CODE = (
    "code from a model's folder is not run; where you trust it, load the model in a function of yours and name that: "
    'model.source = "module:function"'
)


def folder_of(config: TrainConfig) -> Path | None:
    """Return the folder of a Hugging Face model that a configuration names, if it names one."""
    source = config.model.source
    folder = Path(source.removeprefix(HUGGINGFACE))
    return folder if source.startswith(HUGGINGFACE) and (folder / "config.json").is_file() else None


def is_pretrained(config: TrainConfig) -> bool:
    """Return whether the weights are to come from a folder."""
    return folder_of(config) is not None and config.model.init != "random"


def build_huggingface(config: TrainConfig) -> nn.Module:
    """Build a model of transformers: without values where a folder has them, else with random ones.

    Nothing is downloaded, and code that lies in the folder is not run, whatever the configuration says.
    """
    shape = configuration_of(config)
    shape.use_cache = False
    for part in _configurations(shape):
        _check_attention(str(getattr(part, "_attn_implementation", None)))
    folder = folder_of(config)
    if not is_pretrained(config):
        return _of_shape(config, shape)
    assert folder is not None
    if not has_weights(folder):
        PretrainedFolder(folder)  # This names what is missing.
    with lazy():
        model: Any = _of_shape(config, shape)
    model.name_or_path = str(folder)
    _take_generation_config(model, folder)
    return cast(nn.Module, model)


def _configurations(shape: Any) -> Iterator[Any]:
    """Yield the configuration of a model, and those of the models in it."""
    yield shape
    for value in vars(shape).values():
        if hasattr(value, "_attn_implementation"):
            yield from _configurations(value)


def _check_attention(name: str) -> None:
    """Refuse an attention that transformers has from a repository, whose code it downloads and runs."""
    if "/" in name:
        raise UsageError(f"model.source: the attention {name!r} is not of transformers: {NO_FOLDER_CODE}")
    package = FLASH.get(name.removeprefix("paged|"))
    if package is not None and find_spec(package) is None:
        raise UsageError(
            f"model.source: the attention {name!r} needs the package {package}, which is not installed, and "
            f"transformers would take one from a repository instead: install it, or set "
            f"model.options.attn_implementation to sdpa"
        )


def left_out(config: TrainConfig) -> Callable[[str], bool] | None:
    """Choose what checkpoints need not hold, by name: the frozen weights beside adapters, which are in their folder."""
    return (lambda name: not is_adapter(name)) if has_adapters(config) and is_pretrained(config) else None


def base_mark(config: TrainConfig) -> str | None:
    """Return what tells the weights that checkpoints leave out from others."""
    folder = folder_of(config)
    return None if left_out(config) is None or folder is None else PretrainedFolder(folder).fingerprint()


def check_base(config: TrainConfig, saved: Any) -> None:
    """Refuse a checkpoint of adapters that were trained on other weights."""
    mark = base_mark(config)
    if mark != saved:
        raise UsageError(
            f"the checkpoint's adapters were trained on other weights than those that {folder_of(config)} has now "
            f"(marks {saved} and {mark}); restore the folder, or start over with --fresh"
        )


def values_of(config: TrainConfig, model: nn.Module) -> Callable[[str, Tensor], Any] | None:
    """Return what fills the parameters of a model that was built without values; None for one that has them."""
    if not is_lazy(model):
        return None
    folder = folder_of(config)
    assert folder is not None
    weights = PretrainedFolder(folder)
    weights.fit(model)
    adapters = adapter_values(config)

    def fill(name: str, tensor: Tensor) -> None:
        (adapters if is_adapter(name) else weights)(name, tensor)

    return fill


def tensor_plan_of(config: TrainConfig, model: nn.Module) -> Any:
    """Choose how tensors are spread over mesh.tp: as the configuration says, else by the names that the model has."""
    if config.mesh.tensor_plan is not None:
        return config.mesh.tensor_plan
    if config.model.source == "gpt":
        return "gpt"
    if hasattr(getattr(model, "model", None), "embed_tokens"):
        return "llama"
    raise UsageError(
        f"there is no ready plan to divide the tensors of a {type(model).__name__}; set mesh.tensor_plan to "
        f'a table of patterns of layers to styles, such as {{"layers.*.up" = "colwise", "layers.*.down" = "rowwise"}}'
    )


def configuration_of(config: TrainConfig) -> Any:
    name, options = config.model.source.removeprefix(HUGGINGFACE), config.model.options
    _check_counts("model.options", options)
    for remote in {"trust_remote_code", "allow_all_kernels"} & set(options):
        raise UsageError(f"model.options.{remote} is not for configurations: {NO_FOLDER_CODE}")
    try:
        from transformers import CONFIG_MAPPING, AutoConfig  # optional, and slow to load
    except ImportError:
        raise UsageError("huggingface models need the transformers package: pip install transformers") from None
    if folder_of(config) is not None:
        check_folder(name)
        _check_counts(name, read_json(Path(name) / "config.json"))
        try:
            return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:  # transformers and huggingface_hub have errors of their own for kinds of nonsense
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UsageError(f"model.source: {name} cannot be read: {first} ({NO_FOLDER_CODE})") from None
    if config.model.init == "pretrained":
        raise UsageError(
            f'model.init is "pretrained", and {name} is no folder with a config.json; the name of a configuration has '
            f"random weights: leave model.init out, or name a folder that save_pretrained() has written"
        )
    if name not in CONFIG_MAPPING:
        raise UsageError(no_configuration(name, list(CONFIG_MAPPING)))
    return AutoConfig.for_model(name, **options)


def _check_counts(origin: str, document: Mapping[str, Any]) -> None:
    for key, value in document.items():
        if isinstance(value, dict):
            _check_counts(origin, value)
        elif isinstance(value, int) and value > MOST_BUILT and str(key).endswith(ONE_BY_ONE):
            raise UsageError(f"model.source: {origin} has {key} = {str(value)[:40]}; at most {MOST_BUILT} are built")


def _of_shape(config: TrainConfig, shape: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    named = config.model.dtype
    dtype = (getattr(shape, "dtype", None) or torch.float32) if named == "auto" else getattr(torch, named)
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(shape, trust_remote_code=False, dtype=dtype)  # type: ignore[no-untyped-call]
    except (*NONSENSE, RuntimeError) as error:
        name = config.model.source.removeprefix(HUGGINGFACE)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"model.source: {name} is no language model that can be built: {first}") from None
    return model


def _take_generation_config(model: Any, folder: Path) -> None:
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        read_json(folder / "generation_config.json")
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except NONSENSE as error:
            raise UsageError(f"{folder / 'generation_config.json'} cannot be read: {error}") from None
