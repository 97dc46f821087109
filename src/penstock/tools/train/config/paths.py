"""What a configuration names on the disk: looked for before any process starts, and without loading torch."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from penstock.checkpoint.files.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.checkpoint.files.weights import has_weights, no_weights
from penstock.errors import UsageError
from penstock.tools.train.config.consistent import refuse_all
from penstock.tools.train.config.settings import Data, TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE, is_function

CONFIG = "config.json"
NEAR, USUAL = 3, ["llama", "gpt2", "qwen2"]


def check_paths(config: TrainConfig, origin: str = "the configuration") -> None:
    """Raise UsageError with every file and folder that is named and cannot be used."""
    refuse_all([*_model(config), *_data(config), *_adapter(config)], origin)


def no_configuration(name: str, known: Sequence[str]) -> str:
    """Describe a `huggingface:` name that is neither a folder of a model nor a configuration of transformers."""
    folder = Path(name)
    if folder.is_dir():
        return f"model.source: the folder {name} has no {CONFIG}; save_pretrained() of a model writes one"
    folders = [str(folder.parent / near) for near in _near_folders(folder)]
    near = list(dict.fromkeys([*folders, *difflib.get_close_matches(name, known, n=NEAR)])) or USUAL
    return (
        f'model.source: there is no folder "{name}" with a {CONFIG}, and transformers has no configuration of that '
        f"name; near: {', '.join(near)} (nothing is downloaded: save_pretrained() writes a folder)"
    )


def _near_folders(folder: Path) -> list[str]:
    try:
        beside = [path.name for path in folder.parent.iterdir() if (path / CONFIG).is_file()]
    except OSError:
        return []
    return difflib.get_close_matches(folder.name, beside, n=NEAR, cutoff=0.5)


def _model(config: TrainConfig) -> Iterator[str]:
    source = config.model.source
    if not source.startswith(HUGGINGFACE):
        if ":" in source and not is_function(source):
            yield f'model.source is "{source}"; a function is written "module:function", such as "my_models:build"'
        return
    if source == HUGGINGFACE:
        yield f'model.source is "{HUGGINGFACE}"; name a folder after it that save_pretrained() has written'
        return
    folder = Path(source.removeprefix(HUGGINGFACE))
    if (folder / CONFIG).is_file():
        if config.model.init != "random" and not has_weights(folder):
            yield f"model.source: {no_weights(folder)}"
    elif not _may_be_configuration(str(folder)):
        yield no_configuration(str(folder), _configurations())


def _models() -> Path | None:
    """Find where transformers keeps its models, without loading it, which would take seconds."""
    found = find_spec("transformers")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return Path(places[0], "models") if places else None


def _configurations() -> list[str]:
    models = _models()
    return [] if models is None else sorted(path.name for path in models.iterdir() if path.is_dir())


def _may_be_configuration(name: str) -> bool:
    """Return False only where transformers cannot know the name; what is in doubt is seen when the model is built."""
    models = _models()
    if models is None or (models / name.replace("-", "_")).is_dir():
        return True
    return any(f'"{name}"' in file.read_text(encoding="utf-8") for file in (models / "auto").glob("*.py"))


def _data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    for key, named in (("data.source", data.source), ("data.validation_source", data.validation_source)):
        if not named or named == "stdlib" or (isinstance(named, str) and is_function(named)):
            continue
        patterns = [named] if isinstance(named, str) else named
        try:
            if holds_rows(data):
                find_paths(patterns, key)
            elif key == "data.source":
                find_files(patterns)
        except UsageError as error:
            yield str(error)
    if data.tokenizer and not Path(data.tokenizer).expanduser().exists():
        yield no_tokenizer(data.tokenizer)


def no_tokenizer(path: str) -> str:
    """Describe that a tokenizer is not there."""
    return (
        f'data.tokenizer: there is no folder or file "{path}"; name one that tokenizer.save_pretrained has written, or '
        f"a tokenizer.json (nothing is downloaded)"
    )


def _adapter(config: TrainConfig) -> Iterator[str]:
    if config.lora.adapter is None:
        return
    folder = Path(config.lora.adapter)
    if not folder.is_dir():
        yield f"lora.adapter: there is no folder {folder}"
        return
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            yield f"lora.adapter: {folder} has no {name}; save_pretrained() of peft writes one"


JSON_LINES = (".jsonl", ".ndjson")
COMPRESSED = (".gz", ".zip", ".zst", ".xz", ".bz2", ".lz4", ".7z")
ROWS = (*JSON_LINES, ".parquet", ".arrow")


def holds_rows(data: Data) -> bool:
    """Return whether `data.source` names rows, and not text or batches; of a function, `data.format` decides."""
    source = data.source
    if isinstance(source, str) and is_function(source):
        return data.format != "auto"
    patterns = [source] if isinstance(source, str) else source
    return bool(patterns) and all(
        pattern.lower().endswith(ROWS) or _is_saved(Path(pattern).expanduser()) for pattern in patterns
    )


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("state.json", "dataset_info.json", "dataset_dict.json"))


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Find the files of names and globs, each once, in the order of the patterns and then of the names."""
    remedy = 'give files or globs such as "texts/**/*.txt", "stdlib", or "module:function"'
    found = _found(patterns, "data.source", os.path.isfile, remedy)
    if compressed := [path for path in found if path.suffix.lower() in COMPRESSED]:
        raise UsageError(f"data.source: {compressed[0]} is compressed, and its bytes are no text; unpack it first")
    return found


def find_paths(patterns: Sequence[str], key: str) -> list[Path]:
    """Find files as `find_files` does, but of rows, which may be folders."""
    is_plain = lambda name: os.path.isfile(name) or os.path.isdir(name)  # noqa: E731
    return _found(patterns, key, is_plain, 'give files or globs such as "chats/*.jsonl"')


def _found(patterns: Sequence[str], key: str, fits: Callable[[str], bool], remedy: str) -> list[Path]:
    found: dict[Path, None] = {}
    for pattern in patterns:
        here = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        paths = [Path(name) for name in here if fits(name)]
        if not paths:
            raise UsageError(f"{key}: {pattern!r} {'is a folder' if here else 'matches no file'}; {remedy}")
        if all(path.is_file() and not path.stat().st_size for path in paths):
            raise UsageError(f"{key}: {', '.join(map(str, paths))} is empty (0 bytes)")
        found |= dict.fromkeys(paths)
    return list(found)
