"""Reading a configuration: TOML, then `key.sub=value` from the command line, checked against `settings`.

All faults are reported at once. A wrong key comes with the nearest that exists, a wrong value with the values
that would do.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.errors import FileError, UsageError
from penstock.reading import parse_toml, read_json, read_toml
from penstock.tools.train.config.settings import TrainConfig
from penstock.tools.train.config.source import distrust

Settings = TypeVar("Settings")
OFFLOAD = "offloading is not in Penstock; pipeline.recompute, mesh.replicate=fsdp or more ranks need less memory"
EPOCHS = "a run is counted in training.steps, and its first lines say how many an epoch has"
ELSEWHERE = {  # keys of other trainers, by name
    "offload": OFFLOAD,
    "cpu_offload": OFFLOAD,
    "epochs": EPOCHS,
    "num_train_epochs": EPOCHS,
    "learning_rate": "here it is optimizer.lr",
    "batch_size": "here it is data.batch, for all replicas and accumulated passes together",
    "micro_batch_size": "here it is pipeline.microbatches, the number of slices of a batch",
    "sequence_length": "here it is data.sequence",
    "max_seq_length": "here it is data.sequence",
    "max_steps": "here it is training.steps",
    "gradient_accumulation_steps": "here it is training.accumulate",
    "gradient_checkpointing": "here it is pipeline.recompute",
    "max_grad_norm": "here it is optimizer.clip",
    "warmup_steps": "here it is optimizer.warmup",
    "pp": "here it is pipeline.ranks",
    "dp": "here it is mesh.replicas",
    "fsdp": "here it is mesh.replicate=fsdp, with mesh.replicas",
    "bf16": "here it is pipeline.precision=bf16",
}


MOST_FAULTS = 40  # that are looked for
# The largest whole number where a key states no other: far more steps, rows or ranks than anybody has.
MOST = 2**31 - 1


@dataclass(frozen=True)
class Override:
    """A value from the command line: its text, and what TOML makes of it."""

    text: str
    value: Any


def load_config(path: str | Path | None, overrides: Iterable[str] = (), *, trust: bool | None = None) -> TrainConfig:
    """Return the configuration of a file (TOML, or JSON as a run writes it), changed by the command line.

    The functions that it names are trusted, where there is no file, unless `trust` decides otherwise.
    """
    document: dict[str, Any] = {} if path is None else _read(Path(path))
    for given in overrides:
        override(document, given)
    return read_config(
        document, "the configuration" if path is None else str(path), trust=path is None if trust is None else trust
    )


def read_config(document: Any, origin: str, *, trust: bool = False) -> TrainConfig:
    """Return the configuration in a document of whatever origin: a file, a run's folder, a checkpoint.

    This is the only way from a document to a configuration. What it names as module:function is imported only where
    somebody has vouched for it (`trust`).
    """
    if not isinstance(document, dict):
        raise UsageError(f"{origin} holds a {type(document).__name__}; a configuration is a table of keys")
    config = checked(TrainConfig, document, origin)
    return config if trust else distrust(config)


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the configuration's file, such as {path / 'config.json'}")
    try:
        return dict(read_json(path)) if path.suffix == ".json" else read_toml(path)
    except FileNotFoundError:
        raise UsageError(f"there is no configuration {path}; examples/train/gpt.toml is one to start from") from None


def override(document: dict[str, Any], given: str) -> None:
    """Put `key.sub=value` into a document. The value is TOML, or else text as it stands."""
    path, equals, text = given.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise UsageError(f"{given!r} is no setting; write key.sub=value, such as training.steps=100")
    for depth, name in enumerate(names[:-1]):
        inner = document.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{given}: {'.'.join(names[: depth + 1])} is {inner!r}, which has no keys of its own")
        document = inner
    document[names[-1]] = Override(text, _toml(text))


def _toml(text: str) -> Any:
    try:
        found = parse_toml(f"value = {text}", text)
    except FileError:
        return text
    return found["value"] if list(found) == ["value"] else text


def checked(kind: type[Settings], document: Mapping[str, Any], origin: str) -> Settings:
    """Return the settings in a document; raise UsageError with every fault."""
    faults: list[str] = []
    settings = _table(kind, document, "", faults)
    if faults:
        more = " or more" if len(faults) >= MOST_FAULTS else ""
        count = f"{len(faults)}{more} faults:" if len(faults) > 1 else ""
        raise UsageError("\n  ".join([f"{origin}: {count or faults.pop(0)}", *faults]))
    return typing.cast(Settings, settings)


def _table(kind: Any, document: Mapping[str, Any], path: str, faults: list[str], default: Any = None) -> Any:
    """Read the settings of a table; keys that it leaves out are those of `default`, or else of the kind."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in document.items():
        if len(faults) >= MOST_FAULTS:  # Each costs a search for what was meant.
            return None
        full = f"{path}{name}"
        if name not in fields:
            faults.append(_unknown(full, name, list(fields), path))
        elif dataclasses.is_dataclass(hints[name]):
            value = value.value if isinstance(value, Override) else value
            if isinstance(value, Mapping):
                make = fields[name].default_factory
                inside = None if make is dataclasses.MISSING else make()
                values[name] = _table(hints[name], value, f"{full}.", faults, inside)
            else:
                inner = ", ".join(field.name for field in dataclasses.fields(hints[name]))
                faults.append(f"{full} is a table, not {_shown(value)}; its keys are {inner}")
        else:
            values[name] = _value(hints[name], value, full, fields[name], faults)
    if faults:
        return None
    return kind(**values) if default is None else dataclasses.replace(default, **values)


def _unknown(full: str, name: str, known: list[str], path: str) -> str:
    if name in ELSEWHERE:
        return f"there is no key {full}; {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    elsewhere = [other for other, *_ in all_keys() if other.rpartition(".")[2] == name]
    hint = f"{path}{near[0]}" if near else elsewhere[0] if elsewhere else ""
    start = f"there is no key {full}; " + (f"did you mean {hint}? " if hint else "")
    return f"{start}{path.rstrip('.') or 'the top'} has {', '.join(known)}"


def _value(hint: Any, value: Any, path: str, field: dataclasses.Field[Any], faults: list[str]) -> Any:
    text = None
    if isinstance(value, Override):
        text, value = value.text, value.value
    value = _plain(value)
    for kind in _kinds(hint):
        good, found = _fitted(kind, value)
        if good:
            return _bounded(found, path, field, faults)
    if text is not None and any(_fitted(kind, text)[0] for kind in _kinds(hint)):
        return _bounded(text, path, field, faults)
    words = " or ".join(_words(kind) for kind in _kinds(hint) if kind is not type(None))
    near = _near(value, hint)
    faults.append(f"{path} is {_shown(value)}; it takes {words}{_range(field)}{near}")
    return None


def _plain(value: Any) -> Any:
    """Remove the marks of the command line from a value, also inside a table that was given key by key."""
    if isinstance(value, Override):
        return value.value
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fitted(kind: Any, value: Any) -> tuple[bool, Any]:
    """Return whether the value is of that kind, and what it becomes: whole numbers may be floats, booleans neither."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in inner), value
    if kind is type(None):
        return value is None, None
    if origin is list:
        if not isinstance(value, (list, tuple)):
            return False, value
        found = [_fitted(inner[0], item) for item in value]
        return all(good for good, _ in found), [item for _, item in found]
    if origin is dict:
        return isinstance(value, dict), value
    if kind is float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        return good, float(value) if good and abs(value) < 1e300 else value
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, kind), value


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in inner)
    if origin is list:
        return {int: "a list of whole numbers", float: "a list of numbers"}.get(inner[0], "a list of texts")
    if origin is dict:
        return "a table"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]


def _range(field: dataclasses.Field[Any]) -> str:
    least, above, most = (field.metadata[name] for name in ("least", "above", "most"))
    if least is not None and most is not None:
        return f" from {least:g} to {most:g}"
    if least is not None:
        return f", {least:g} or more"
    if above is not None and most is not None:
        return f" above {above:g}, up to {most:g}"
    return f" above {above:g}" if above is not None else ""


def _bounded(value: Any, path: str, field: dataclasses.Field[Any], faults: list[str]) -> Any:
    least, above, most = (field.metadata[name] for name in ("least", "above", "most"))
    counts = value if isinstance(value, list) else [value]
    large = [each for each in counts if isinstance(each, int) and abs(each) > MOST]
    if large and most is None:
        faults.append(f"{path} is {str(large[0])[:40]}; a whole number is at most {MOST:,} there")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        wrong = (
            (most is not None and value > most)
            or (least is not None and value < least)
            or (above is not None and value <= above)
            or not math.isfinite(value)
        )
        if wrong:
            kind = "whole" if str(field.type).startswith("int") else "finite"
            faults.append(f"{path} is {value}; it takes a {kind} number{_range(field)}")
    return value


def _near(value: Any, hint: Any) -> str:
    choices = [
        choice for kind in _kinds(hint) if typing.get_origin(kind) is Literal for choice in typing.get_args(kind)
    ]
    near = difflib.get_close_matches(str(value), map(str, choices), n=1, cutoff=0.5)
    return f" (nearest: {json.dumps(near[0])})" if near else ""


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "nothing" if value is None else str(value)


def all_keys(kind: Any = TrainConfig, path: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Yield (key, what it takes, its default, what it is) of everything that can be set."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from all_keys(hint, f"{path}{field.name}.")
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        words = " or ".join(_words(inner) for inner in _kinds(hint) if inner is not type(None))
        yield f"{path}{field.name}", words + _range(field), default, field.metadata["about"]


def changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Describe what is different between two documents, key by key."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from changes(before.get(name), after.get(name), f"{path}.{name}" if path else name)
    elif before != after:
        yield f"{path} {_shown(before)} -> {_shown(after)}"


def to_document(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration as a document with every key; `checked` turns it back."""
    return dataclasses.asdict(config)
