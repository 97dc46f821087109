"""Where the ranks of a pipeline compute: on the devices that were asked for, where the model is, or what there is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.devices import accelerator, indexed, on_accelerator, own_backend
from penstock.errors import UsageError
from penstock.model.staged_model import StagedModel
from penstock.parallel.group.world import World
from penstock.runtime.optim.tied import tied_places
from penstock.schedule import Placement

AUTO = "auto"


def check_devices(devices: Any) -> None:
    """Raise for devices that torch does not see here."""
    for device in () if devices is None or devices == AUTO else map(torch.device, devices):
        if device.type == "meta":
            raise UsageError("devices has meta, where nothing is computed; name 'cpu' or devices that torch sees here")
        if not on_accelerator(device):
            continue
        count = torch.accelerator.device_count() if device.type == accelerator() else 0
        if (device.index or 0) >= count:
            seen = f"{count} of them" if count else f"no {'GPU' if device.type == 'cuda' else device.type}"
            raise UsageError(
                f"devices has {device}, but torch sees {seen} here; leave devices= out to use what there is"
            )


def home_of(modules: Iterable[nn.Module]) -> torch.device | None:
    """Return where modules are, by their first tensor that is anywhere; None if they have none."""
    tensors = (tensor for each in modules for tensor in (*each.parameters(), *each.buffers()))
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), None)


def devices_of_ranks(
    asked: Sequence[torch.device | str] | str | None, staged: StagedModel, placement: Placement, world: World
) -> dict[int, torch.device]:
    """Return the device of each local rank; none where all of them stay on the CPU.

    A model that is on an accelerator stays there. On "auto" any other goes to the accelerator: a process takes the
    device of its local rank, and threads take one each, or share one where they share parameters.
    """
    ranks = range(placement.ranks)
    local = ranks if world.rank is None else [world.rank]
    if asked is not None and not isinstance(asked, str):
        if len(asked) != len(ranks):
            raise UsageError(f"{len(asked)} devices for {len(ranks)} ranks; pass one for each rank")
        return {rank: indexed(asked[rank]) for rank in local}
    modules = {rank: [staged.parts[stage].module for stage in placement.stages_of(rank)] for rank in ranks}
    homes = {rank: home_of(each) for rank, each in modules.items()}
    found = next((home for home in homes.values() if on_accelerator(home)), None)
    if found is not None:
        return {rank: homes[rank] or found for rank in local}
    kind = accelerator()
    if asked is None or kind is None:
        return {}
    if world.size is None:
        owners = _together(staged, placement)
        return {rank: torch.device(kind, owners[rank] % torch.accelerator.device_count()) for rank in local}
    return dict.fromkeys(local, torch.device(kind, own_index())) if own_backend(world.group, kind) is not None else {}


def _together(staged: StagedModel, placement: Placement) -> list[int]:
    """Return for each rank the first of those with which it shares parameters, or itself."""
    owners = list(range(placement.ranks))
    holdings = staged.holdings()
    for places in tied_places(staged):
        shared = {owners[placement.rank_of(holdings[number].stage)] for number, _ in places}
        owners = [min(shared) if owner in shared else owner for owner in owners]
    return owners


def measuring_device(
    asked: Sequence[torch.device | str] | str | None, modules: Iterable[nn.Module], world: World
) -> torch.device | None:
    """Return the device on which a model is measured before it is cut; None where it is measured where it is."""
    if asked is None or not isinstance(asked, str):
        return indexed(asked[0]) if asked else None
    kind = accelerator()
    if (
        kind is None
        or on_accelerator(home_of(modules))
        or (world.size is not None and own_backend(world.group, kind) is None)
    ):
        return None
    return torch.device(kind, 0 if world.size is None else own_index())


def own_index() -> int:
    """Return the number of this process's device: that which the process has set, or the one of its local rank."""
    count, processes = torch.accelerator.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > count and not any(name.endswith("VISIBLE_DEVICES") for name in os.environ):  # These may differ.
        raise UsageError(
            f"{processes} processes on this host share {count} devices, and each needs one of its own; start "
            f'{count} processes, or pass devices=None (in penstock train: pipeline.device = "cpu") to run on the CPU'
        )
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    current = torch.accelerator.current_device_index() if bound is None else bound.index
    return current or dist.get_node_local_rank(fallback_rank=dist.get_rank()) % count
