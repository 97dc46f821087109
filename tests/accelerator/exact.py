"""Cases of exactness on the device: a plain loop on one device, and a pipeline with a device for each rank.

The cases and models are those of tests/exactness. Here the truth is the plain loop on the same kind of device, since a
device draws other random numbers than the CPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from accelerator import hosts, pretend
from exactness.cases import SEED, STEPS, Case, Outcome, example, outcome, plain_step, sums_in_order
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import penstock

ALONE = 7  # the device of the plain loop, on which no rank is


def there(value: Any, device: torch.device) -> Any:
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, value)


def here(found: Outcome) -> Outcome:
    return {name: None if each is None else each.cpu() for name, each in found.items()}


def plain(case: Case) -> Outcome:
    return _plain(case.model, case.stages, case.microbatches, case.rows, case.optimizer, case.dtype)


@cache
def _plain(model: str, stages: int, count: int, rows: int, optimizer: bool, dtype: torch.dtype) -> Outcome:
    """Train the model as a plain loop on one device."""
    made, device = example(model, stages, rows, dtype), pretend.device(ALONE)
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(ALONE)
    for each in made.stages:
        each.to(device)
    made.args, made.target = there(made.args, device), there(made.target, device)
    whole = nn.ModuleList(made.stages)
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9) if optimizer else None
    losses: list[Tensor] = []
    for step in range(STEPS):
        losses += [each.cpu() for each in plain_step(made, step, count)]
        if sgd is not None:
            sgd.step()
            if step < STEPS - 1:
                sgd.zero_grad()
    torch.accelerator.set_device_index(before)
    return here(outcome(whole.named_parameters(), whole.named_buffers(), losses))


def pipelined(case: Case, rank: int | None = None, overlapped: bool = False, **options: Any) -> Outcome:
    """Train the model as a pipeline, on threads, or as this process's rank; every rank has the device of its number."""
    made = example(case.model, case.stages, case.rows, case.dtype)
    devices = [pretend.device(each) for each in range(case.ranks)]
    pipe = penstock.Pipeline(
        made.stages,
        microbatches=case.microbatches,
        schedule=case.family,
        loss_fn=made.loss_fn,
        cut_options=penstock.CutOptions(skips=made.skips),
        recompute=case.recompute,
        seed=SEED,
        timeout=20,
        devices=devices,
        **options,
    )
    with pipe:
        placement = pipe.schedule.placement
        first, last = placement.rank_of(0), placement.rank_of(case.stages - 1)
        args = there(made.args, devices[first if rank is None else rank])
        target = there(made.target, devices[last if rank is None else rank])
        sgd = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9) if case.optimizer else None
        losses: list[Tensor] = []
        for result in _steps(pipe, args, target, sgd, overlapped):
            assert result.loss is not None
            losses += [each.cpu() for each in (*result.losses, result.loss)]
        return here(outcome(pipe.named_parameters(), pipe.named_buffers(), losses))


def _steps(pipe: Any, args: Any, target: Any, sgd: Any, overlapped: bool) -> Iterator[Any]:
    """Run the steps one by one, or by the loop that overlaps them."""
    if overlapped:
        yield from pipe.train_steps([(*args, target)] * STEPS, sgd)
        return
    for step in range(STEPS):
        yield pipe.step(*args, target=target)
        if sgd is not None:
            sgd.step()
            if step < STEPS - 1:
                sgd.zero_grad()


def differences(case: Case, found: Outcome, whole: bool) -> list[str]:
    """Return what is not as in the plain loop; `whole`: all of the model is in `found`, and not one rank's part."""
    wanted, exact = plain(case), sums_in_order(case.schedule)
    faults = [f"only one of both has {sorted(set(found) ^ set(wanted))}"] if whole and set(found) != set(wanted) else []
    for name in sorted(set(found) & set(wanted)):
        one, other = found[name], wanted[name]
        if one is None or other is None:
            same = one is other
        else:
            same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        if not same:
            faults.append(f"{name}: pipelined {one}, plain {other}"[:300])
    return faults


def faults_on_threads(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Return what is wrong with each case, by its name: differences from the plain loop, races, an error."""
    with hosts.apart():  # what one rank's thread has waited for, another one knows only where they meet
        return _faults(cases, lambda case: pipelined(case), whole=True)


def faults_behind_the_host(cases: Sequence[Case]) -> dict[str, list[str]]:
    """Return the same with streams that run behind the host, on threads or on processes."""
    pretend.defer(lag=0.0005)
    return faults_on_processes(cases) if torch.distributed.is_initialized() else faults_on_threads(cases)


def faults_on_processes(cases: Sequence[Case]) -> dict[str, list[str]]:
    rank = torch.distributed.get_rank()
    return _faults(cases, lambda case: pipelined(case, rank), whole=False)


def _faults(cases: Sequence[Case], run: Any, whole: bool) -> dict[str, list[str]]:
    found = {}
    for case in cases:
        plain(case)  # its synchronisations order nothing in the pipeline
        pretend.clear()
        try:
            faults = differences(case, run(case), whole)
        except Exception:
            if not whole:
                raise  # the other ranks of the group are not with this case any more
            faults = [traceback.format_exc()]
        faults += [f"race: {race}" for race in pretend.races()]
        if faults:
            found[str(case)] = faults
    return found
