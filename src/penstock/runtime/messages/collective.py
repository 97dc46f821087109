"""Plain values through torch's collectives: for groups that no transport of ours serves, and before there is one.

torch's own object collectives unpickle whatever comes; these read plain values only (see `plain`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from penstock.errors import MessageError
from penstock.runtime.messages import plain


def all_gather(value: Any, group: Any) -> list[Any]:
    """Return every member's value, by its number in the group. All members must call it."""
    device = torch.device(_get_object_coll_device(group))
    count = dist.get_world_size(group)
    mine = torch.frombuffer(bytearray(plain.dumps(value)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device), group=group)
    lengths = [int(size.item()) for size in sizes]
    longest = max(lengths)
    if not 0 < longest <= plain.MESSAGE_BYTES:
        raise MessageError(
            f"a member of the group announces a message of {longest} bytes; at most {plain.MESSAGE_BYTES} are read"
        )
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    found = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(found, padded, group=group)
    try:
        return [plain.loads(bytes(each.tolist()[:length])) for each, length in zip(found, lengths, strict=True)]
    except plain.NotPlainError as error:
        raise MessageError(f"a message from a member of the group cannot be read: {error}") from error
