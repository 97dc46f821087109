"""`"module:function"`: the user's own code, named in a configuration, and whether it may be imported.

A configuration that somebody else may have written is read with the names of its functions as `Distrusted` text, and
here, where code is imported, such a name is refused. The keys that name code are marked in `settings`; only the values
of these are ever imported.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

from penstock.errors import UsageError
from penstock.tools.train.config.settings import TrainConfig

HUGGINGFACE = "huggingface:"  # what follows is the name of a configuration
# With this, a Python that is started does not search its working folder.
NOT_HERE = ("PYTHONSAFEPATH", "penstock")
SENDING = "logging.wandb"
FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@contextmanager
def searching_no_working_folder() -> Iterator[None]:
    """Have interpreters that are started inside search the folders of libraries alone; others are the user's."""
    before = {name: os.environ.get(name) for name in (NOT_HERE[0], "PYTHONPATH")}
    search_no_working_folder()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def search_no_working_folder() -> None:
    """Have interpreters that this process starts search the folders of libraries alone.

    `python -c`, by which multiprocessing starts its own, looks into the working folder first, so that a json.py there,
    which came with somebody's data, would run.
    """
    os.environ.setdefault(*NOT_HERE)
    if paths := os.environ.get("PYTHONPATH"):  # an empty entry in it is the working folder, too
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths.split(os.pathsep)))


def is_function(text: str) -> bool:
    """Return whether the text has the form `module:function`."""
    return FORM.fullmatch(text) is not None and not text.startswith(HUGGINGFACE)


class Distrusted(str):
    """The name of a function in a configuration that nobody has vouched for; copied and pickled, it stays one."""

    __slots__ = ()


def code_values(table: Any, path: str = "") -> dict[str, Any]:
    """Return the values of all keys that may name code, by key."""
    found: dict[str, Any] = {}
    for field in fields(table):
        value = getattr(table, field.name)
        if is_dataclass(value):
            found |= code_values(value, f"{path}{field.name}.")
        elif field.metadata["code"]:
            found[f"{path}{field.name}"] = value
    return found


CODE_KEYS = frozenset(code_values(TrainConfig()))


def functions_in(config: TrainConfig) -> dict[str, str]:
    """Return the functions that a configuration names, by key: to train it is to run them."""
    return {key: text for key, text in code_values(config).items() if isinstance(text, str) and is_function(text)}


def distrust(config: TrainConfig) -> TrainConfig:
    """Return the configuration with its functions out of reach, and sending: whoever uses one of them gets an error."""
    sending = {} if config.logging.wandb == "off" else {SENDING: config.logging.wandb}
    for key, text in {**functions_in(config), **sending}.items():
        table, _, name = key.rpartition(".")
        config = replace(config, **{table: replace(getattr(config, table), **{name: Distrusted(text)})})
    return config


def is_trusted(config: TrainConfig) -> bool:
    """Return whether all functions that it names may be imported."""
    return not any(isinstance(text, Distrusted) for text in functions_in(config).values())


def require_trust(config: TrainConfig, what: str) -> None:
    """Raise UsageError with the functions that it names, unless they may be imported."""
    if not is_trusted(config):
        listed = ", ".join(f"{key} = {text!r}" for key, text in functions_in(config).items())
        raise UsageError(f"{what} would import and call {listed}; read them, then add --trust")


def check_sending(config: TrainConfig) -> None:
    """Raise UsageError where somebody else may have written to whom the run's figures go, with the user's own key."""
    if isinstance(config.logging.wandb, Distrusted):
        raise UsageError(
            f"{SENDING} is {config.logging.wandb!r}, in a configuration that somebody else may have written, and "
            f"logging.wandb_options say where figures go, and your key with them: {config.logging.wandb_options}; read "
            f"them, then add --trust, or set {SENDING}=off"
        )


def libraries_of(config: TrainConfig) -> list[str]:
    """Return the modules of other libraries that a run of this configuration loads, and that take seconds to load."""
    huggingface = config.model.source.startswith(HUGGINGFACE)
    adapters = config.lora.rank > 0 or config.lora.adapter is not None
    used = {"transformers.models.auto.modeling_auto": huggingface, "peft": adapters}
    return [name for name, wanted in used.items() if wanted]


def find_source(key: str, text: str) -> Any:
    """Return the function itself; the working folder is looked in first, as `python -m` does."""
    if key not in CODE_KEYS:
        raise ValueError(f"{key} has no code=True in its settings, without which nothing that it names is imported")
    if isinstance(text, Distrusted):
        raise UsageError(
            f"{key} is {text!r}, in a configuration that somebody else may have written, and it would be imported "
            f"and called; read it, then add --trust (from Python: trust=True)"
        )
    if not is_function(text):
        raise UsageError(f'{key} is "{text}"; a function is written "module:function", such as "my_models:build"')
    module_name, _, path = text.partition(":")
    if os.environ.get(NOT_HERE[0]) == NOT_HERE[1]:  # the user's code finds its own, also in processes that it starts
        del os.environ[NOT_HERE[0]]
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # The user's module imports something that is not there.
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
    """Call the function with the options."""
    found = find_source(key, text)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise UsageError(
            f"{key}: {text} does not take these options ({', '.join(options) or 'none'}): {error}"
        ) from None
    except ValueError:  # A built-in may not list what it takes.
        pass
    return found(**options)
