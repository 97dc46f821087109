"""Ranks on several hosts, forked from one process that has torch loaded: a namespace costs a fork, not five seconds.

    with ranks_on(hosts, 2, function, folder, *arguments) as ranks:     two per host, numbered host by host
        ranks.until(lambda: ranks.said(3))                              what rank 3 has said so far
        ranks.wait()                                                    until all have ended

`function(say, *arguments)` stands at the top of a test file. What a rank says is a value that JSON can hold, with the
time by the one clock that all namespaces read. A process of torchrun would have the same environment.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
from hosts.network import CABLE
from processes import SECRET, loaded

CLONE_NEWNET = 0x40000000
LIMIT = 300.0  # seconds for whatever is waited for


class Ranks:
    """The ranks of one test, looked at from outside."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
        self.process, self.count, self._folder = process, count, folder

    def said(self, rank: int) -> list[Any]:
        """What a rank has said, each as [seconds, value]."""
        path = self._folder / f"{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def words(self) -> str:
        """What all of them wrote, for a test that fails."""
        logs = [self._folder / f"{rank}.txt" for rank in range(self.count)]
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists())

    def until(self, ready: Callable[[], Any]) -> Any:
        """Wait for something while they run."""
        deadline = time.monotonic() + LIMIT
        while not (found := ready()):
            assert self.process.poll() is None, f"the ranks have ended:\n{self.words()}"
            assert time.monotonic() < deadline, f"waited for {LIMIT:g} s:\n{self.words()}"
            time.sleep(0.02)
        return found

    def wait(self) -> list[Any]:
        """The last thing that each rank has said, once all have ended; an error on any is one here."""
        code = self.process.wait(LIMIT)
        assert code == 0, self.words()
        return [self.said(rank)[-1][1] for rank in range(self.count)]


@contextmanager
def ranks_on(
    hosts: list[Any], each: int, function: Callable[..., Any], folder: Path, *arguments: Any
) -> Iterator[Ranks]:
    """Start `each` ranks on every host; they are killed in the end."""
    places = [[host.holder, host.address] for host in hosts for _ in range(each)]
    job = {"file": function.__code__.co_filename, "name": function.__name__, "arguments": arguments, "each": each}
    (folder / "job.json").write_text(json.dumps({**job, "places": places}))
    first = hosts[0]
    inside = ["nsenter", "--target", str(first.holder), "--user", "--preserve-credentials"]
    process = subprocess.Popen([*inside, sys.executable, __file__, str(folder)], stdin=subprocess.DEVNULL)
    try:
        yield Ranks(process, folder, len(places))
    finally:
        for host in hosts:
            host.kill()
        process.kill()
        process.wait()


def main(folder: Path) -> int:
    """In the process that has the hosts' user namespace: fork a rank into each namespace."""
    job = json.loads((folder / "job.json").read_text())
    loaded(job["file"], job["name"])  # and torch with it, before the forks
    for rank, (holder, _) in enumerate(job["places"]):
        if not os.fork():
            os._exit(_run(folder, job, rank, holder))
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in job["places"]]
    return int(any(codes))


def _run(folder: Path, job: dict[str, Any], rank: int, holder: int) -> int:
    with (folder / f"{rank}.txt").open("wb") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    try:
        _move_to(holder)
        _train(folder, job, rank)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _move_to(holder: int) -> None:
    """Into the network namespace of another process."""
    descriptor = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to the host of process {holder}")
    os.close(descriptor)


def _train(folder: Path, job: dict[str, Any], rank: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    places = job["places"]
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(places)),
        LOCAL_RANK=str(rank % job["each"]),
        LOCAL_WORLD_SIZE=str(job["each"]),
        MASTER_ADDR=places[0][1],
        MASTER_PORT="29577",
        GLOO_SOCKET_IFNAME=CABLE,
        PENSTOCK_SECRET=SECRET,
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with (folder / f"{rank}.jsonl").open("w", buffering=1) as lines:
        loaded(job["file"], job["name"])(
            lambda value: lines.write(json.dumps([time.monotonic(), value]) + "\n"), *job["arguments"]
        )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
