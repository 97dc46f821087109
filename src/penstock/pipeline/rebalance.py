"""A better cut while training goes on.

From a measured step each piece gets the weight that its stage really had, a better cut follows,
and applying it moves what changes hands: on threads nothing, because all stages live in one
process; on processes the values of parameters and buffers and the optimizer's state of them, from
the rank that has them to the rank that will. The next step is what it would have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.model.balance.proposal import Proposal, propose
from penstock.model.original.placeholders import take_back
from penstock.model.staged_model import StagedModel
from penstock.pipeline.model_state.carry import carry
from penstock.pipeline.model_state.other_ranks import held_on, owners_of
from penstock.runtime.engine.replication import Replication
from penstock.runtime.optim.tied import tied_places
from penstock.runtime.state.batch_norm import whole_stages
from penstock.runtime.transport import Transport
from penstock.schedule import Placement, Timeline, align

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Groups = list[tuple[torch.optim.Optimizer, dict[str, Any]]]  # of parameters, each with its optimizer


def propose_cut(staged: StagedModel, timeline: Timeline | None) -> Proposal:
    """What a measured step says about the cut; the same on every rank."""
    if staged.recut is None:
        raise UsageError(f"{staged.how}: that cannot be cut anew; pass an nn.Sequential, or a module with example=")
    if timeline is None:
        raise UsageError("nothing was measured with this cut; run a step inside `with pipe.record():` first")
    if not isinstance(timeline, Timeline):
        raise UsageError(f"timeline={timeline!r}: pass what `with pipe.record() as timeline:` gives")
    if not timeline.spans:
        raise UsageError("the timeline is empty; run a step inside `with pipe.record() as timeline:` first")
    weights = [float(weight.milliseconds or weight.parameters) for weight in staged.weights]
    return propose(weights, staged.cuts, timeline, allowed=staged.allowed or None)


def move_state(
    before: StagedModel,
    after: StagedModel,
    placement: Placement,
    transport: Transport | None,
    optimizer: Optimizers,
) -> None:
    """Everything that a rank needs under the new cut and did not own under the old one."""
    if transport is None:
        return
    groups = _groups_of(optimizer)
    _check_groups(transport.exchange([str(group.get("name", "")) for _, group in groups]))
    owners, wanted = owners_of(before, placement), owners_of(after, placement)
    items = [
        (name, min(owners[name]), sorted(wanted[name] - owners[name]))
        for name in sorted(wanted)
        if wanted[name] - owners[name]
    ]
    old, new = held_on(before, placement, transport.rank), held_on(after, placement, transport.rank)
    carry(
        transport,
        items,
        lambda name: _packed(old[name], groups),
        lambda name, sent: _unpack(new[name], sent, groups),
    )
    kept = set(map(id, new.values()))
    for held in old.values():
        if isinstance(held, Tensor) and id(held) not in kept:
            _give_up(groups, held)


def _groups_of(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> Groups:
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ()
    return [(each, group) for each in optimizers for group in each.param_groups]


def _check_groups(answers: list[list[str]]) -> None:
    """A moved parameter joins the group with the number that it had: they have to be alike on all ranks."""
    for rank, groups in enumerate(answers):
        if groups != answers[0]:
            said = [
                f"optimizers with {len(each)} groups {' '.join(each)}".rstrip() if each else "no optimizer"
                for each in (answers[0], groups)
            ]
            raise UsageError(
                f"apply() got {said[0]} on rank 0 and {said[1]} on rank {rank}, so a parameter that moves would join "
                f"another group; make the groups with pipe.parameter_groups(), which has all of them on every rank"
            )


def _packed(held: Tensor | nn.Module, groups: Groups) -> tuple[Any, bool, Any]:
    """What is sent: a value, whether it is trained, and its optimizer's state of it."""
    if isinstance(held, Tensor):
        return held.detach(), held.requires_grad, _state_of(groups, held)
    return held.get_extra_state(), False, None


def _unpack(held: Tensor | nn.Module, sent: tuple[Any, bool, Any], groups: Groups) -> None:
    value, trained, state = sent
    if not isinstance(held, Tensor):
        held.set_extra_state(value)
        return
    with torch.no_grad():
        take_back(held).copy_(value)
    if isinstance(held, nn.Parameter):
        held.requires_grad_(trained)  # frozen or not where it comes from
    _take_over(groups, held, state)


def _state_of(groups: Groups, tensor: Tensor) -> tuple[int, Mapping[str, Any]] | None:
    """(number of its parameter group, its state) of a parameter that is trained."""
    for number, (optimizer, group) in enumerate(groups):
        if any(tensor is parameter for parameter in group["params"]):
            return number, dict(optimizer.state.get(tensor, {}))
    return None


def _take_over(groups: Groups, tensor: Tensor, state: Any) -> None:
    if state is None or not isinstance(tensor, nn.Parameter):
        return
    number, values = state
    optimizer, group = groups[number]
    if not any(tensor is parameter for parameter in group["params"]):
        group["params"].append(tensor)
    optimizer.state[tensor] = {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()
    }


def _give_up(groups: Groups, tensor: Tensor) -> None:
    for optimizer, group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not tensor]
        optimizer.state.pop(tensor, None)


def apply_cut(pipe: Pipeline, proposal: Proposal, optimizer: Optimizers) -> bool:
    """Give a pipeline another cut, between two steps; whether it has one now."""
    deployment = pipe.deployment
    before = deployment.staged
    if before.recut is None or not proposal.changes:
        return False
    if any(parameter.grad is not None for parameter in pipe.parameters()):
        raise UsageError("there are gradients; call optimizer.step() and zero_grad() before apply()")
    if type(deployment.replication) is not Replication:
        raise UsageError("a pipeline with replicas or spread tensors keeps its cut; make a new one with split_at=")
    deployment.ranks.changes.check()
    after = replace(before.recut(proposal.cuts), loss=before.loss)
    schedule = deployment.schedule.compute().replace(topology=after.topology)
    move_state(before, after, schedule.placement, deployment.world.transport, optimizer)
    deployment.staged = after
    deployment.programs = deployment.programs.successor(
        align(schedule), lambda always: whole_stages(after.parts, always=always)
    )
    pipe.state.other_ranks.moved(deployment)
    deployment.ranks = deployment.ranks.successor(after, schedule.placement)
    tied = tied_places(after)  # before anything takes the place of a parameter
    deployment.put_on_devices()
    deployment.ranks.track_changes()
    pipe.follow_cut(tied)
    return True
