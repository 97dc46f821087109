"""What a checkpoint is on disk, and whether one is whole.

::

    step-00000100/
      manifest.json               step, config, layout, versions; size and checksum of all files, itself included
      index.json                  every tensor: type, shape, which file has which piece; and all plain values
      process-00000.safetensors   the tensors that process 0 wrote

A directory gets its name by a rename when all of that is on the disk, so a name without a dot is a whole checkpoint
unless something damaged it later. Nothing here is a pickle, and reading runs no code from a checkpoint, whoever made
it. The checksum is CRC-32, which finds every flipped bit and every torn file at 2 GB/s. It is no protection against
forgery: a forged checkpoint can hold other numbers, and nothing else. What it says of itself (sizes, types, pieces) is
compared with what is there before any memory is asked for.

Which of several is the newest is said by a serial number and not by the step: who goes back to step 100 and trains on
has abandoned step 300.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CheckpointError, UsageError
from penstock.reading import MOST_BYTES, check_like, read_json
from penstock.rules import is_float

MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT = "penstock checkpoint"
VERSION = 1
PIECE = 16 * 2**20  # bytes that are read and summed at a time
LONGEST = 2**28  # bytes of an index
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What the origin of a model may hold.
ORIGIN = {"folder": "", "config": {}, "generation_config": {}, "adapter": {"lora_alpha": 1.0}}
BEST = "best"  # As a name in a path, the checkpoint with the lowest score.
FOLDER = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. `files` maps a name to (bytes, CRC-32 in hex)."""

    step: int
    serial: int
    saved_at: str
    config: Any
    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, tuple[int, str]]
    # A model that came from transformers has its configuration here.
    origin: Mapping[str, Any] | None = None
    score: float | None = None  # The best checkpoint is the one with the lowest.
    while_best: bool = False  # Saved for its score, it stays while that is the lowest.

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


@dataclass(frozen=True, order=True)
class Named:
    """A directory that is called like a checkpoint of a step, whatever is in it."""

    step: int
    again: int  # a step that is saved anew gets another name, so that the rename takes nothing away
    path: Path


def folder_name(step: int, again: int = 0) -> str:
    return f"step-{step:08d}" + (f".{again}" if again else "")


def checkpoints_in(directory: Path) -> list[Named]:
    """Return checkpoints by step; hidden ones (being written, or being deleted) are left out."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Named(int(match[1]), int(match[2] or 0), path))
    return sorted(found)


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with its own checksum in it."""
    body = {"format": FORMAT, "version": VERSION, **document}
    return json.dumps({**body, "checksum": _own_checksum(body)}, indent=1).encode() + b"\n"


def _own_checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest, if it is one and is whole; the files that it lists are not looked at."""
    file = path / MANIFEST
    document = _json(file, f"{path} is not a checkpoint of Penstock, or is not complete", MOST_BYTES)
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the manifest of a Penstock checkpoint", path=path)
    body = {name: value for name, value in document.items() if name != "checksum"}
    if document.get("checksum") != _own_checksum(body):
        raise CheckpointError(f"{file} is damaged: its checksum does not match its content", path=path)
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {body.get('version')!r}; this Penstock reads {VERSION}", path=path
        )
    try:
        files = {plain_name(name): (_count(size, name), str(crc)) for name, (size, crc) in body["files"].items()}
        return Manifest(
            step=_count(body["step"], "step"),
            serial=_count(body["serial"], "serial"),
            saved_at=str(body["saved_at"]),
            config=body["config"],
            layout=dict(body["layout"]),
            versions=dict(body["versions"]),
            files=files,
            origin=_origin(body.get("origin")),
            score=_score(body.get("score")),
            while_best=body.get("while_best") is True,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a complete manifest: {error!r}", path=path) from error


def plain_name(name: Any) -> str:
    """Return the name of a file in the checkpoint's own directory."""
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} is {str(value)[:40]}, not a count")
    return value


def _origin(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is not None:
        check_like(value, ORIGIN, "origin")
    return value


def _score(value: Any) -> float | None:
    if value is not None and not (is_float(value) and math.isfinite(value)):
        raise ValueError(f"score is {str(value)[:40]}, not a finite number")
    return None if value is None else float(value)


def read_index(path: Path) -> dict[str, Any]:
    """Read the index of a checkpoint whose files have been verified."""
    document: dict[str, Any] = _json(path / INDEX, f"{path} has no index", LONGEST)
    if not isinstance(document.get("tensors"), dict):
        raise CheckpointError(f"{path / INDEX} is not the index of a Penstock checkpoint", path=path)
    return document


def _json(file: Path, otherwise: str, most: int) -> Any:
    try:
        return read_json(file, most=most)
    except FileNotFoundError:
        raise CheckpointError(f"{otherwise}: {file} does not exist", path=file.parent) from None
    except NotADirectoryError:
        raise CheckpointError(f"{file.parent} is a file; a checkpoint is a directory", path=file.parent) from None
    except OSError as error:
        raise CheckpointError(f"{file} is damaged or cannot be read: {error.strerror}", path=file.parent) from error


def damages(path: Path, manifest: Manifest, *, sums: bool, part: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """Yield what is wrong with the files, each by name; `sums` reads them all, else sizes alone are compared.

    `part` is (which, of how many): processes share the reading.
    """
    for number, (name, (size, crc)) in enumerate(sorted(manifest.files.items())):
        if number % part[1] != part[0]:
            continue
        file = path / name
        try:
            status = os.lstat(file)
            if not stat.S_ISREG(status.st_mode):
                yield f"{file} is not a plain file"
            elif status.st_size != size:
                yield f"{file} has {status.st_size} bytes, and the manifest says {size}: truncated or foreign"
            elif sums and (found := checksum_of(file)) != crc:
                yield f"{file} is damaged: its CRC-32 is {found}, and the manifest says {crc}"
        except FileNotFoundError:
            yield f"{file} is missing"
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}"


def check_files(path: Path) -> Manifest:
    """Compare every byte of a checkpoint with its checksum; return the manifest or raise an error that lists all."""
    manifest = read_manifest(path)
    wrong = list(damages(path, manifest, sums=True))
    if wrong:
        raise CheckpointError("\n  ".join([f"{path} is not complete:", *wrong]), path=path)
    return manifest


def checksum_of(file: Path) -> str:
    value = 0
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(PIECE):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def newest_first(directory: Path) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """Find the checkpoints of a directory whose manifest and sizes are right, and what is wrong with the others."""
    whole, problems = [], []
    for named in checkpoints_in(directory):
        try:
            manifest = read_manifest(named.path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        wrong = list(damages(named.path, manifest, sums=False))
        if wrong:
            problems.extend(wrong)
        else:
            whole.append((named.path, manifest))
    whole.sort(key=lambda pair: pair[1].serial, reverse=True)
    return whole, problems


def best_of(whole: list[tuple[Path, Manifest]]) -> Path | None:
    """Find the checkpoint with the lowest score; of several with the same, the first that was saved."""
    scored = [(manifest.score, manifest.serial, path) for path, manifest in whole if manifest.score is not None]
    return min(scored)[2] if scored else None


def find_newest(directory: Path) -> tuple[Path | None, list[str]]:
    """Find the newest whole checkpoint, and why others were passed over."""
    whole, problems = newest_first(directory)
    return (whole[0][0] if whole else None), problems


def checkpoints_at(place: str | Path) -> list[Path]:
    """Find the checkpoint at a place, or all in the directory there; of a run's folder, those of the run."""
    path = Path(place)
    if (path / MANIFEST).exists():
        return [path]
    if not path.exists():
        raise UsageError(f"there is no {place}; give a run's folder, a directory of checkpoints, or one of them")
    found = [named.path for named in checkpoints_in(path) or checkpoints_in(path / "checkpoints")]
    if not found:
        raise UsageError(f"{place} is not a checkpoint and contains none (they have names such as step-00000100)")
    return found


def find_checkpoint(place: str | Path) -> Path:
    """Find the checkpoint at a place, or the newest whole one in the directory or run there; at RUN/best, the best."""
    if Path(place).name == BEST and not Path(place).exists():
        whole, _ = newest_first(checkpoints_at(Path(place).parent)[0].parent)
        best = best_of(whole)
        if best is None:
            raise UsageError(
                f"{place}: none of the {len(whole)} checkpoints there has a score, such as a validation loss; name one "
                f"by its step, or {Path(place).parent} for the newest"
            )
        return best
    found = checkpoints_at(place)
    if found == [Path(place)]:
        return found[0]
    newest, problems = find_newest(found[0].parent)
    if newest is None:
        raise CheckpointError("\n  ".join([f"{place} has no complete checkpoint:", *problems]))
    return newest
