"""`"module:function"`: the user's own code, named in a configuration."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.train.config.settings import TrainConfig

HUGGINGFACE = "huggingface:"  # what follows is the name of a configuration
FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_function(text: str) -> bool:
    """Is `module:function` meant?"""
    return FORM.fullmatch(text) is not None and not text.startswith(HUGGINGFACE)


def functions_in(config: TrainConfig) -> dict[str, str]:
    """The functions that a configuration names, by key: to train it is to run them."""
    sources = {
        "model.source": config.model.source,
        "data.source": config.data.source,
        "logging.callback": config.logging.callback,
        "loss.function": config.loss.function,
    }
    return {key: text for key, text in sources.items() if isinstance(text, str) and is_function(text)}


def libraries_of(config: TrainConfig) -> list[str]:
    """Modules of other libraries that a run of this configuration loads, and that take seconds to load."""
    huggingface = config.model.source.startswith(HUGGINGFACE)
    adapters = config.lora.rank > 0 or config.lora.adapter is not None
    used = {"transformers.models.auto.modeling_auto": huggingface, "peft": adapters}
    return [name for name, wanted in used.items() if wanted]


def find_source(key: str, text: str) -> Any:
    """The function itself; the working folder is looked in first, as `python -m` does."""
    if not is_function(text):
        raise UsageError(f'{key} is "{text}"; a function is written "module:function", such as "my_models:build"')
    module_name, _, path = text.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # of something that the user's module imports
        raise UsageError(f"{key}: there is no module {error.name}, neither in {here} nor installed") from None
    for name in path.split("."):
        if not hasattr(found, name):
            known = ", ".join(sorted(name for name in vars(found) if not name.startswith("_"))[:12])
            raise UsageError(f"{key}: {module_name} has no {path}; it has {known or 'nothing'}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{key}: {text} is a {type(found).__name__}, not a function")
    return found


def call_source(key: str, text: str, options: dict[str, Any]) -> Any:
    """What the function returns for the options."""
    found = find_source(key, text)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise UsageError(
            f"{key}: {text} does not take these options ({', '.join(options) or 'none'}): {error}"
        ) from None
    except ValueError:  # a built-in that does not say what it takes
        pass
    return found(**options)
