"""A folder that transformers' `save_pretrained` has written, read tensor by tensor.

No process reads more than it asks for: names, shapes and types come from the headers of the files, and a tensor goes
from its file into the memory that is there for it in pieces. safetensors maps a file into memory, and pages that were
read stay in this process until the file is closed; so a file is opened for one piece and closed again, and what a rank
needs is its own tensors plus one piece. What transformers keeps otherwise in files than in models (the experts of a
mixture are one tensor in the model and one per expert in the folder) is renamed, put together or taken apart by
transformers' own rules, applied to the names of all tensors and to the values of those that a rank asks for.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from penstock.checkpoint.files.adapters import is_adapter, name_without_adapter
from penstock.checkpoint.files.tensors import TYPES, open_tensors
from penstock.checkpoint.files.weights import INDEX, WEIGHTS, no_weights
from penstock.errors import FileError, UsageError
from penstock.reading import open_plain, read_json

Read = Callable[[str], Tensor]


@dataclass
class Conversion:
    """How some tensors of a model are made of stored ones."""

    model: Any
    rule: Any  # transformers' WeightConverter
    target: str  # the first tensor that it makes
    sources: list[tuple[str, str]] = field(default_factory=list)  # the pattern that a stored name has matched, the name

    def make(self, read: Read) -> dict[str, Tensor]:
        """Make the tensors by their names in the model; `read` returns a stored one by its name."""
        rule = deepcopy(self.rule)  # The rule collects what it is given.
        for pattern, name in self.sources:
            rule.add_tensor(self.target, name, pattern, partial(read, name))
        made = rule.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def convert_names(
    model: nn.Module, state: Mapping[str, Tensor], stored: Collection[str]
) -> tuple[dict[str, str], list[Conversion]]:
    """Find where the tensors of a model are: stored names by those in the model, and what has to be converted.

    Stored names that the model has no use for are in neither. A model that is not of transformers has its own names.
    """
    rules = _rules(model)
    if rules is None:
        return {name: name for name in stored if name in state}, []
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, known = getattr(model, "base_model_prefix", ""), dict(state)
    places: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            continue
        if pattern is None:
            places[target] = name
        else:
            made = conversions.setdefault(target, Conversion(model, by_pattern[pattern], target))
            made.sources.append((pattern, name))
    return places, list(conversions.values())


def _rules(model: nn.Module) -> list[Any] | None:
    """Return what transformers does to a folder of such a model when it loads it; None for other models."""
    if not hasattr(model, "base_model_prefix"):
        return None
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else None


MOST_INDEX = 2**28  # bytes; of a million tensors it has half of that
PIECE = 4 * 2**20  # bytes of a tensor that are in memory beside the tensor itself
ENDS = 2**20  # bytes of a file's beginning and end that tell it from others
SHOWN = 8  # names in an error
_DTYPES = {name: dtype for dtype, name in TYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is, its shape and its type."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class PretrainedFolder:
    """The weights in a folder that `save_pretrained` has written, for `Pipeline(..., init=PretrainedFolder(path))`.

    Each process reads only the tensors of its own stages. Weights in one file and in several are both read.

    Args:
        folder: The folder, with `model.safetensors` or with `model.safetensors.index.json` and the files it names.
        file: The name of the only file, where it is another one.
    """

    def __init__(self, folder: str | os.PathLike[str], file: str = WEIGHTS) -> None:
        self.folder = Path(folder)
        self._file = file
        self.tensors = dict(self._stored())
        self._places: dict[str, str] = {}  # names that a tensor has in the model, and not in the file
        # By name in the model: tensors that are stored otherwise.
        self._conversions: dict[str, Conversion] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor with the values that are stored under its name.

        Args:
            name: The name in the model.
            tensor: The tensor to fill; values are converted to its dtype.
        """
        stored_as = self._places.get(name, name)
        if stored_as in self._conversions:
            with torch.no_grad():
                tensor.copy_(self._conversions[stored_as].make(self._read)[stored_as])
            return
        stored = self.tensors.get(stored_as)
        if stored is None:
            raise UsageError(
                f"{self.folder} has no tensor {name}; it has, for one, {', '.join(list(self.tensors)[:3])}"
            )
        if stored.shape != tuple(tensor.shape):
            raise UsageError(f"{self.folder}: {name} has shape {stored.shape}, and {tuple(tensor.shape)} in the model")
        with torch.no_grad():
            for begin, end in _pieces(tensor):
                with self._open(stored.file) as file:
                    if end is None:
                        tensor.copy_(file.get_tensor(stored_as))
                    else:
                        tensor[begin:end].copy_(file.get_slice(stored_as)[begin:end])

    def fit(self, model: nn.Module) -> None:
        """Compare names and shapes with a model of transformers, and read the buffers that are stored.

        Adapters that were put into the model are left out, and what they were put around is found under its old name.

        Args:
            model: The model, with or without values. A parameter that is in several places may be stored once.
        """
        own: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
        state = {name_without_adapter(name): value for name, value in own.items() if not is_adapter(name)}
        self._places = {name: name_without_adapter(name) for name in own}
        stored_as, shapes = self._find(model, state)
        places: dict[int, list[str]] = {}
        for name, value in state.items():
            places.setdefault(id(value), []).append(name)
        missing, wrong = [], []
        for names in places.values():
            found = next((name for name in names if name in stored_as), None)
            if found is None:
                missing.append(names[0])
                continue
            self._places |= {name: stored_as[found] for name, plain in self._places.items() if plain in names}
            if shapes[found] != tuple(state[found].shape):
                wrong.append(f"{found} {shapes[found]}, not {tuple(state[found].shape)}")
        missing = _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
        used = {*stored_as.values(), *(name for each in self._conversions.values() for _, name in each.sources)}
        unknown = _without((name for name in self.tensors if name not in used), ignored)
        kinds = {"missing": missing, "unknown": unknown, "of another shape": wrong}
        if any(kinds.values()):
            raise UsageError(
                f"{self.folder} does not have the weights of {type(model).__name__}: {_listed(kinds)}. Its config.json "
                f'must be that of the weights; model.init = "random" starts without weights'
            )
        for name, buffer in state.items():
            if not isinstance(buffer, nn.Parameter):
                self(name, buffer)

    def _find(self, model: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
        """Find, by name in the model, under which name a tensor is stored, or made by a conversion; and its shape
        there.
        """
        stored_as, conversions = convert_names(model, state, self.tensors)
        shapes = {name: self.tensors[stored].shape for name, stored in stored_as.items()}
        self._conversions = {}
        for conversion in conversions:
            made = conversion.make(lambda name: torch.empty(self.tensors[name].shape, device="meta"))
            self._conversions |= dict.fromkeys(made, conversion)
            shapes |= {name: tuple(value.shape) for name, value in made.items()}
            stored_as |= {name: name for name in made}
        return stored_as, shapes

    def _read(self, name: str) -> Tensor:
        with self._open(self.tensors[name].file) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def fingerprint(self) -> str:
        """Return what distinguishes these weights from others: of every file its size, its beginning and its end."""
        mark = 0
        for name in self._files():
            with open(open_plain(self.folder / name), "rb") as file:
                for begin in (0, max(0, os.fstat(file.fileno()).st_size - ENDS)):
                    file.seek(begin)
                    mark = zlib.crc32(file.read(ENDS) + str(begin).encode(), mark)
        return f"{mark:08x}"

    def _stored(self) -> Iterator[tuple[str, StoredTensor]]:
        for file in self._files():
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118  (no mapping)
                    found = opened.get_slice(name)
                    dtype = _DTYPES.get(found.get_dtype())
                    if dtype is None:
                        raise UsageError(f"{self.folder / file}: {name} is of type {found.get_dtype()}, not read here")
                    yield name, StoredTensor(file, tuple(found.get_shape()), dtype)

    def _files(self) -> list[str]:
        if (self.folder / self._file).is_file() or self._file != WEIGHTS:
            return [self._file]
        if not (self.folder / INDEX).is_file():
            raise UsageError(no_weights(self.folder))
        try:
            named = set(read_json(self.folder / INDEX, most=MOST_INDEX)["weight_map"].values())
        except (KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"{self.folder / INDEX} is no index of weights: {error!r}") from error
        odd = [name for name in named if not isinstance(name, str) or Path(name).name != name]
        if odd:
            raise UsageError(f"{self.folder / INDEX} names {odd[0]!r}, which is not a file of the same folder")
        return sorted(named)

    def _open(self, file: str) -> Any:
        try:
            return open_tensors(self.folder / file)
        except FileNotFoundError as error:
            raise UsageError(f"{self.folder / file}: there is no such file; copy it again") from error
        except FileError:
            raise
        except SafetensorError as error:
            path = self.folder / file
            raise UsageError(
                f"{path} ({path.stat().st_size:,} bytes) cannot be read, as if it were incomplete: {error}; copy it "
                f"again"
            ) from error
        except OSError as error:
            raise UsageError(f"{self.folder / file} cannot be read: {error.strerror}") from error


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int | None]]:
    """Yield rows of a tensor that are read at a time; (0, None) for all of it."""
    size = tensor.numel() * tensor.element_size()
    if not tensor.dim() or size <= PIECE:
        yield 0, None
        return
    rows = max(1, tensor.shape[0] * PIECE // (2 * size))  # a slice is a copy of the pages that it was read from
    for begin in range(0, tensor.shape[0], rows):
        yield begin, min(begin + rows, tensor.shape[0])


def _without(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _listed(kinds: Mapping[str, list[str]]) -> str:
    return "; ".join(
        f"{what} {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}"
        for what, names in kinds.items()
        if names
    )
