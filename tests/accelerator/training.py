"""What surrounds the steps of a pipeline on devices: overlapped steps, checkpoints, replicas and shards."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerator import exact, pretend
from exactness.cases import SEED, STEPS, Case, Outcome, outcome
from exactness.models import example
from parallel import cases as replicated
from parallel import spread
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock.model.moved import move_together


def faults_of_overlapped_steps(cases: Sequence[Case]) -> list[str]:
    """Return what is not as in the plain loop: gradients are zeroed at the end of the loop, all else is compared."""
    rank = dist.get_rank() if dist.is_initialized() else None
    faults = []
    for case in cases:
        exact.plain(case)
        pretend.clear()
        found = exact.pipelined(case, rank, overlapped=True)
        found = {name: value for name, value in found.items() if not name.endswith(" gradient")}
        assert "losses" in found
        faults += [f"{case}: {each}" for each in exact.differences(case, found, whole=False)]
        faults += [str(race) for race in pretend.races()]
    return faults


def faults_of_checkpoint(case: Case, shared: str = "") -> list[str]:
    """Return what differs between a run, and one that is saved in the middle and goes on in new objects.

    Processes save to a folder that they share.
    """
    with tempfile.TemporaryDirectory() as own:
        folder = shared or own
        devices = [pretend.device(each) for each in range(case.ranks)]

        def run(load: bool) -> Outcome:
            made = example(case.model, case.stages, case.rows, case.dtype)
            with penstock.Pipeline(
                made.stages,
                microbatches=case.microbatches,
                schedule=case.family,
                loss_fn=made.loss_fn,
                seed=SEED,
                devices=devices,
            ) as pipe:
                optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
                placement, rank = pipe.schedule.placement, dist.get_rank() if dist.is_initialized() else None
                ends = [placement.rank_of(stage) if rank is None else rank for stage in (0, case.stages - 1)]
                args, target = exact.there(made.args, devices[ends[0]]), exact.there(made.target, devices[ends[1]])
                saver = penstock.Checkpointer(folder)
                losses = []
                if load:
                    assert saver.load(pipe, optimizer) is not None
                for number in range(int(load), 2):
                    losses = [pipe.step(*args, target=target).loss.cpu()]
                    optimizer.step()
                    optimizer.zero_grad()
                    if number == 0:
                        saver.save(1, pipe, optimizer)
                saver.close()
                for each in pipe.parameters():
                    assert each.device in devices
                    state = optimizer.state[each]
                    assert all(value.device == each.device for value in state.values() if value.dim() > 0)
                return exact.here(outcome(pipe.named_parameters(), pipe.named_buffers(), losses))

        without, resumed = run(load=False), run(load=True)
        faults = [
            name for name, value in without.items() if value is not None and not torch.equal(value, resumed[name])
        ]
        return faults + [str(race) for race in pretend.races()]


def losses_across_layouts(folder: str, stages: int, goes_on: bool) -> list[float]:
    """Return losses of three steps, of which the last two follow a checkpoint; or of these two, from that."""
    from torch.optim import AdamW

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]).double()
    x, y = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    options = {"stages": stages, "microbatches": 4, "loss_fn": nn.MSELoss(), "timeout": 30}
    with penstock.Pipeline(model, **options) as pipe, penstock.Checkpointer(folder) as saver:
        optimizer, losses = AdamW(pipe.parameters(), lr=0.1), []
        if goes_on:
            assert saver.load(pipe, optimizer) is not None
        for number in range(int(goes_on), 3):
            losses.append(float(pipe.step(x, target=y).loss))  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                saver.save(1, pipe, optimizer)
        assert {each.device.type for each in pipe.parameters()} == {pretend.NAME}
    return losses


def with_spread_tensors(cases: Sequence[spread.Case], sizes: dict[str, int]) -> list[Outcome]:
    """Train with tensors that are spread over devices; returns what each case found on this rank."""
    mesh = penstock.mesh(**sizes)
    found = [spread.pipelined(case, mesh) for case in cases]
    return [{name: exact.there(value, torch.device("cpu")) for name, value in each.items()} for each in found]


def faults_on_mesh(cases: Sequence[replicated.Case]) -> dict[str, list[str]]:
    """Return what differs from the plain loop over the whole batch, on four processes: two ranks, two replicas."""
    mesh = init_device_mesh(pretend.NAME, (2, 2), mesh_dim_names=("pp", "dp"))
    devices = [pretend.device(2 * each + mesh.get_local_rank("dp")) for each in range(2)]
    found = {}
    for case in cases:
        wanted = _plain_with_replicas(case)
        pretend.clear()
        part = exact.here(replicated.pipelined(case, mesh, devices=devices))
        in_order = case.in_order and case.model != "tied"
        faults = [
            f"{name}: {value} and not {wanted[replicated.untied(name, case)]}"[:300]
            for name, value in part.items()
            if not replicated.same(value, wanted[replicated.untied(name, case)], exact=in_order)
        ]
        faults += [str(race) for race in pretend.races()]
        if faults:
            found[str(case)] = faults
    return found


def _plain_with_replicas(case: replicated.Case) -> Outcome:
    made, device = case.made(), pretend.device(exact.ALONE)
    whole = nn.ModuleList(made.stages)
    move_together([whole], device)  # where `to` would part tied weights
    made.args, made.target = exact.there(made.args, device), exact.there(made.target, device)
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9) if case.optimizer else None
    losses = []
    for step in range(STEPS):
        parameters = list(whole.parameters())
        losses.append(replicated.plain_step(made, case, step, parameters).cpu())
        if sgd is not None:
            sgd.step()
            if step < STEPS - 1:
                sgd.zero_grad()
    return exact.here(replicated.outcome(whole.named_parameters(), losses))


def gradients_of_torchs_own_replicas(kind: str) -> dict[str, Any]:
    """Train by torch's DDP or FSDP2 alone; return the worst difference from the mean over all ranks' batches."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = pretend.device(rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    alone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    alone.load_state_dict(model.state_dict())
    batches = torch.randn(size, 6, 8).to(device)
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in (model[0], model[2]):
            fully_shard(layer)
        wrapped = fully_shard(model)
    for _ in range(2):
        wrapped(batches[rank]).square().sum().backward()
        for batch in batches:
            (alone(batch).square().sum() / size).backward()
    worst = 0.0
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        whole = replicated.whole_of(found.grad)
        worst = max(worst, float((whole - wanted.grad).abs().max()))
    return {"worst": worst, "races": [str(race) for race in pretend.races()]}
