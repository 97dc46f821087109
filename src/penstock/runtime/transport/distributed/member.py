"""A rank as a member of its process group: what a transport takes from torch.distributed, and from gloo's threads.

Every connection of gloo has a loop thread in this process, which each packet wakes. Where all cores are busy, the
kernel gives it the core of a thread that computes, at once: mostly that of the main thread, and often in the middle of
a write, whose lock the loop thread then polls for. That costs a rank with small messages more than the messages do.

`SCHED_BATCH` keeps a thread from taking a core from others when it wakes. It runs at once where a core is free, as one
is where a main thread waits for a message; else when somebody gives way, or at the scheduler's next tick. So `give_way`
belongs before a send, so that gloo knows which receives are announced, and after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from penstock.errors import PeerFailure
from penstock.runtime.transport.forks import keep_in_forks

LOOP_THREAD = "gloo_tcp_loop"  # what gloo calls them
_made: dict[str, int] = {}  # transports made so far on each process group, for tags and keys of their own
_gloo: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()  # for groups that have no backend for the CPU


class Member(NamedTuple):
    """What a transport needs of its process group, and of this rank's place in it."""

    rank: int
    ranks: int
    backend: Any  # serves the CPU
    kinds: Mapping[str, str]  # By type of device: the backend that serves it, where that is not the CPU's.
    backend_name: str
    store: Any
    store_host: int | None  # the rank whose process has the store, if one has
    number: int  # Counts the transports of the group, for tags and keys of its own.
    world: Sequence[int]  # By rank in the group: the rank in the world.


def member_of(group: dist.ProcessGroup, timeout: float) -> Member:
    """Return this rank in the group, for one more transport."""
    number = _made[group.group_name] = _made.get(group.group_name, -1) + 1
    members = dist.get_process_group_ranks(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    kinds = dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
    return Member(
        dist.get_rank(group),
        len(members),
        _serving_the_cpu(group, store, timeout),
        {device: kind for device, kind in kinds.items() if device != "cpu" and kind not in (kinds.get("cpu"), "gloo")},
        str(dist.get_backend(group)),
        store,
        None if has_agent() or 0 not in members else members.index(0),
        number,
        members,
    )


def _serving_the_cpu(group: dist.ProcessGroup, store: Any, timeout: float) -> Any:
    """Return the group's backend for the CPU; if it has none (NCCL alone), one of gloo for all transports on it.

    Gloo connects all ranks in one call that names nobody, so each first waits in the store for all others.
    """
    if torch.device("cpu") in group._device_types:
        return group._get_backend(torch.device("cpu"))
    if group not in _gloo:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        place, limit = PrefixStore(f"penstock/gloo/{group.group_name}", store), timedelta(seconds=timeout)
        place.set(f"here/{rank}", "")
        for peer in range(ranks):
            try:
                place.wait([f"here/{peer}"], limit)
            except RuntimeError as error:  # each store has its own
                cause = f"did not make its pipeline within {timeout:g} s, while rank {rank} waited to connect by gloo"
                raise PeerFailure(peer, f"{cause} ({error})") from error
        _gloo[group] = keep_in_forks(dist.ProcessGroupGloo(place, rank, ranks, limit))
    return _gloo[group]


def has_agent() -> bool:
    """Return whether torchrun's agent has the store, and no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def loop_threads() -> list[int]:
    """Return the loop threads of this process, by their number; none where the system does not show them."""
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # The thread has just ended.
            if (task / "comm").read_text().strip() == LOOP_THREAD:
                found.append(int(task.name))
    return found


def hold_back_loop_threads() -> Callable[[], None] | None:
    """Keep all loop threads from taking cores from others; returns `give_way`, or None where there is none held back.

    A thread to which somebody has given another policy keeps that.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return None
    held_back = False
    for thread in loop_threads():
        with suppress(OSError):  # The thread has just ended, or this is not permitted.
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            held_back |= os.sched_getscheduler(thread) == os.SCHED_BATCH
    return os.sched_yield if held_back else None
