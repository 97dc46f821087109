"""Builds the pretended device, once for each state of its sources: `python tests/accelerator/build.py` builds it ahead.

The library lies in the user's cache folder under a hash of the sources, torch's version and the flags. Whoever builds
holds a lock of the operating system, which ends with its process: a killed build leaves nothing that another waits for,
and two pytest workers build once. A library has another name until it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
MODULE = "pretended_device"
FLAGS = ["-O1", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter"]
KEPT = 4  # builds of other states, so that two branches do not build in turns


class CannotBuildError(Exception):
    """Something is missing, or the compiler failed."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests" / "accelerator"


def fingerprint() -> str:
    """Return the name of the build: other sources, another torch, Python or compiler flags make another."""
    found = hashlib.sha256()
    for part in (importlib.metadata.version("torch"), sys.version, *FLAGS):
        found.update(f"{part}\n".encode())
    for each in sorted(SOURCES.iterdir()):
        found.update(each.name.encode() + each.read_bytes())
    return found.hexdigest()[:16]


def library() -> Path:
    """Return where the library of the present sources is, or will be."""
    return cache_folder() / fingerprint() / f"{MODULE}.so"


def missing() -> str:
    """Return what a build lacks here, by name; empty where nothing does."""
    compiler = os.environ.get("CXX", "g++")
    lacking = [compiler] if shutil.which(compiler) is None else []
    if _ninja() is None:
        lacking.append("ninja")
    return " and ".join(lacking)


def built() -> Path:
    """Return the library, and build it first where it is not there. May take a minute or two."""
    target = library()
    if target.exists():
        return target
    if lacking := missing():
        raise CannotBuildError(
            f"the pretended device cannot be built: {lacking} not found (Debian: g++ and ninja-build)"
        )
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent.parent / "building"):
        if not target.exists():
            _compile_into(target)
            _remove_old(target.parent)
    return target


def _ninja() -> str | None:
    beside = Path(sys.executable).parent / "ninja"
    return str(beside) if beside.exists() else shutil.which("ninja")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, and not with a file."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile_into(target: Path) -> None:
    """Compile in a process of its own: this loads torch, which the caller may have to load after the device."""
    folder = target.parent.parent / "objects"  # of the build before: only what has changed is compiled
    folder.mkdir(exist_ok=True)
    (folder / "lock").unlink(missing_ok=True)  # torch's, of a build that was killed: the next would wait for ever
    program = [sys.executable, str(Path(__file__).resolve()), "--compile", str(folder)]
    path = f"{Path(_ninja() or '').parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PRETEND_NAME": "pretend"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuildError(f"the pretended device cannot be built:\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}")
    target.parent.mkdir(exist_ok=True)
    half = target.with_suffix(f".{os.getpid()}")
    shutil.copy2(folder / target.name, half)
    half.rename(target)


def _compile(folder: Path) -> None:
    from torch.utils import cpp_extension

    os.environ.setdefault("MAX_JOBS", "2")
    sources = sorted(str(each) for each in SOURCES.glob("*.cpp"))
    cpp_extension.load(MODULE, sources, extra_cflags=FLAGS, build_directory=str(folder), verbose=True)


def _remove_old(newest: Path) -> None:
    builds = [each for each in newest.parent.iterdir() if (each / f"{MODULE}.so").exists() and each != newest]
    for each in sorted(builds, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(each, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        _compile(Path(sys.argv[2]))
    elif sys.argv[1:] == ["--if-possible"] and missing() and not os.environ.get("CI"):
        print(f"The pretended accelerator is not built, and its tests will be skipped: {missing()} not found.")
    else:
        print(built())
