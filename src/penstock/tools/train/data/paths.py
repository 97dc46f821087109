"""The files that `data.source` names, found without loading torch: the command looks before it starts anything."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import UsageError
from penstock.tools.train.config.settings import Data
from penstock.tools.train.config.source import is_function

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
    found = _found(
        patterns,
        "data.source",
        os.path.isfile,
        'give files or globs such as "texts/**/*.txt", "stdlib", or "module:function"',
    )
    if compressed := [path for path in found if path.suffix.lower() in COMPRESSED]:
        raise UsageError(f"data.source: {compressed[0]} is compressed, and its bytes are no text; unpack it first")
    return found


def find_paths(patterns: Sequence[str], key: str) -> list[Path]:
    """Find files as `find_files` does, but of rows, which may be folders."""
    return _found(
        patterns,
        key,
        _is_plain,
        'give files or globs such as "chats/*.jsonl"',
    )


def _is_plain(name: str) -> bool:
    return os.path.isfile(name) or os.path.isdir(name)


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
