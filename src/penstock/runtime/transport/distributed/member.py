"""A rank as a member of its process group: what a transport takes from torch.distributed, all in one place."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_made: dict[str, int] = {}  # transports made so far on each process group, for tags and keys of their own


class Member(NamedTuple):
    """What a transport needs of its process group, and of this rank's place in it."""

    rank: int
    ranks: int
    backend: Any  # serves the CPU
    device_backend: Any  # serves the device of this rank, where that is another
    backend_name: str
    store: Any
    store_host: int | None  # the rank whose process has the store, if one has
    number: int  # of this transport among those of the group, for tags and keys of its own


def member_of(group: dist.ProcessGroup, device: torch.device | str | None) -> Member:
    """This rank in the group, for one more transport."""
    number = _made[group.group_name] = _made.get(group.group_name, -1) + 1
    members = dist.get_process_group_ranks(group)
    return Member(
        dist.get_rank(group),
        len(members),
        group._get_backend(torch.device("cpu")),
        _find_device_backend(group, None if device is None else torch.device(device)),
        str(dist.get_backend(group)),
        dist.distributed_c10d._get_process_group_store(group),
        None if has_agent() or 0 not in members else members.index(0),
        number,
    )


def has_agent() -> bool:
    """Whether torchrun's agent has the store, and no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _find_device_backend(group: dist.ProcessGroup, device: torch.device | None) -> Any:
    """The group's backend for this device, if it is not the one that serves the CPU."""
    if device is None or device.type == "cpu":
        return None
    backend = group._get_backend(device)
    return None if backend.name() == group._get_backend(torch.device("cpu")).name() else backend
