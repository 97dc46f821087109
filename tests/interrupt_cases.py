"""Random rehearsals of training with Ctrl-C: up to three on any rank at any line, with and without a death beside it.

A seed draws the schedule, `step` or `train_steps`, with or without `clip`, the kind of links, and what comes when. The
user catches Ctrl-C and every failure, and goes on with the batch after the steps that are complete. What must be true:
no rank waits for the timeout, whoever is named was struck, no step is offered to be run again by a group that is given
up, and in the end either all ranks have the weights of the undisturbed run, or all of them refuse to go on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PeerFailure, PenstockError
from penstock.schedule import Costs, Schedule, build
from penstock.tools.rehearsal.faults import PlannedFault
from penstock.tools.rehearsal.training import Attempt, rehearse_training

STEPS, MICROBATCHES, TIMEOUT = 5, 3, 60.0
CLIP = 0.4  # bites in some of the steps
COSTS = Costs(forward=0.3, input=0.21, weight=0.17, hop=0.05)
MOST_ERRORS = 8  # that the user takes before he gives up


class Case(NamedTuple):
    """One rehearsal."""

    family: str
    ranks: int
    clip: float | None  # of `train_steps`; below 0, for a loop of `step`
    interrupts_waits: bool
    faults: list[PlannedFault]
    seed: int

    @property
    def schedule(self) -> Schedule:
        return build(self.family, self.ranks, MICROBATCHES)

    def run(self, quiet: bool = False) -> tuple[Attempt, list[Life]]:
        lives = [Life(self) for _ in range(self.ranks)]
        options: dict[str, Any] = {"seed": self.seed, "timeout": TIMEOUT, "steps": 4 * STEPS}
        faults = [] if quiet else [self.faults]
        attempt = rehearse_training(
            lambda rank: lives[rank].train(rank),
            self.schedule,
            COSTS,
            faults=faults,
            interrupts_waits=self.interrupts_waits,
            **options,
        )[0]
        return attempt, lives


class Life:
    """What the script of one rank lives through."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.errors: list[BaseException] = []
        self.weights: list[Tensor] = []
        self.is_given_up = False  # the group of processes, by the last of the errors

    def train(self, rank: int) -> None:
        """Train as a user does who catches everything and goes on."""
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(self.case.schedule.stages)]
        pipe = penstock.Pipeline(
            layers, schedule=self.case.schedule, loss_fn=nn.functional.mse_loss, seed=1, timeout=TIMEOUT
        )
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        self.counter = pipe.deployment.counter
        is_done = False
        while not is_done:
            try:
                self._go_on(pipe, optimizer)
                pipe.settle()
                is_done = True
            except (KeyboardInterrupt, PenstockError) as error:
                self.errors.append(error)
                self.is_given_up = pipe.deployment.world.transport.broken is not None
                if len(self.errors) > MOST_ERRORS or self.is_given_up or _is_final(error):
                    raise
        self.weights = [value.detach().clone() for value in pipe.parameters()]
        pipe.close()

    def _go_on(self, pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> None:
        """Train until there is an error."""
        clip = self.case.clip
        pipe.settle()
        if self.counter.step == STEPS:
            return
        if clip is None or clip > 0:
            for _ in pipe.train_steps(
                [batch_of(each) for each in range(self.counter.step, STEPS)], optimizer, clip=clip
            ):
                pass
            return
        while (before := self.counter.step) < STEPS:
            x, y = batch_of(before)
            try:
                pipe.step(x, target=y)
            finally:
                if self.counter.step > before:  # it is complete, whatever came at its end
                    optimizer.step()
                    optimizer.zero_grad()


def _is_final(error: BaseException) -> bool:
    """Whether an error asks for a checkpoint, without which there is no going on."""
    return any("load a checkpoint" in text for text in (str(error), *getattr(error, "__notes__", ())))


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs, target = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64).unbind()
    return inputs, target


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    draw = random.Random(seed)
    family, ranks = draw.choice(["1f1b", "zb-h2", "zb-v", "gpipe"]), draw.choice([2, 2, 3])
    clip = draw.choice([None, CLIP, 1e9, -1.0])
    case = Case(family, ranks, clip, draw.random() < 0.5, [], seed)
    seconds, _ = undisturbed(family, ranks, clip)
    first = draw.uniform(0, seconds)
    victim = draw.randrange(ranks)
    for number in range(draw.choice([1, 1, 2, 2, 3])):
        rank = victim if draw.random() < 0.6 else draw.randrange(ranks)
        at = first if not number or draw.random() < 0.6 else min(seconds, first + draw.uniform(0, 3))
        lines = draw.choice([0, draw.randrange(40), draw.randrange(1000)])
        case.faults.append(PlannedFault("interrupt", at, rank, lines=lines))
    if draw.random() < 0.25:
        case.faults.append(PlannedFault("die", draw.uniform(max(0, first - 3), first + 3), draw.randrange(ranks)))
    return case


@cache
def undisturbed(family: str, ranks: int, clip: float | None) -> tuple[float, list[list[Tensor]]]:
    """How long the run takes that nothing disturbs, and the weights of each rank in the end."""
    attempt, lives = Case(family, ranks, clip, True, [], 0).run(quiet=True)
    assert attempt.is_complete, attempt.errors
    return attempt.seconds, [life.weights for life in lives]


def faults_of(case: Case) -> list[str]:
    """What is wrong with the outcome of a case, in words."""
    return list(_faults(case, *case.run()))


def _faults(case: Case, attempt: Attempt, lives: list[Life]) -> Iterator[str]:
    seconds, weights = undisturbed(case.family, case.ranks, case.clip)
    given_up = {rank for rank, life in enumerate(lives) if any(map(_is_final, life.errors))}
    struck = {fault.rank for fault in attempt.struck} | given_up  # whose process has ended, in good order
    dead = {fault.rank for fault in attempt.struck if fault.kind == "die"}
    if attempt.hung:
        yield f"ranks {attempt.hung} hang"
    if attempt.seconds > (len(case.faults) + 2) * seconds + 15:
        yield f"somebody waited for the timeout: {attempt.seconds:.0f} s for {seconds:.0f}"
    for rank, life in enumerate(lives):
        for error in life.errors:
            if isinstance(error, PeerFailure) and error.rank not in struck and "no longer belong" not in error.cause:
                yield f"rank {rank} names rank {error.rank}: {error.cause}"
            if (
                not isinstance(error, KeyboardInterrupt)
                and "no longer belong" not in str(error)
                and (not isinstance(error, PeerFailure) and "have not completed the same number" not in str(error))
            ):
                yield f"rank {rank} raised {error!r}"
            if isinstance(error, KeyboardInterrupt) and rank not in {fault.rank for fault in attempt.struck}:
                yield f"rank {rank} raised {error!r}"
        if life.is_given_up and any("run again" in note for note in getattr(life.errors[-1], "__notes__", ())):
            yield f"rank {rank} offers to run a step again, in a group that is given up: {life.errors[-1]!r}"
    done = {rank for rank, life in enumerate(lives) if life.weights}
    refused = set(range(case.ranks)) - done - dead
    if done and refused:
        yield f"ranks {done} are done, and ranks {refused} refuse to go on: {[lives[each].errors for each in refused]}"
    for rank in done:
        if any(not torch.equal(mine, theirs) for mine, theirs in zip(lives[rank].weights, weights[rank], strict=True)):
            yield f"rank {rank} has other weights"
