"""Ranks that make different calls: every rank names each rank's call, and the odd one as the culprit.

A table of all pairs of calls that ranks make together. In each case one rank makes another call than the others; on two
processes nobody is odd, so both are named. Cases share a launch, each with a group and a pipeline of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from tiers import by_turns, tiers
from torch import nn
from torch.nn import functional as F
from transports import ON_PROCESSES

import penstock
from penstock.errors import PeerFailure
from penstock.model.balance.proposal import Proposal

TIMEOUT = 60.0  # seconds; different calls are known long before it
M, WIDTH = 2, 4
CALLS = [
    "step()",
    "evaluate()",
    "predict()",
    "clip_grad_norm_(1)",
    "clip_grad_norm_(2)",
    "grad_norm()",
    "GradScaler.unscale_()",
    "record()",
    "apply()",
    "save()",
    "load()",
]
Case = tuple[str, ...]  # the call of each rank


def enter(pipe: penstock.Pipeline) -> None:
    pipe.deployment.world._one_host = False  # so that clocks must be compared
    with pipe.record():
        pass


def make(pipe: penstock.Pipeline, folder: Path) -> dict[str, Callable[[], Any]]:
    """All calls that need every rank, by the name that an error has for them."""
    x = torch.ones(4, WIDTH)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    def apply() -> None:
        pipe.zero_grad()
        before = tuple(pipe.deployment.staged.cuts)
        pipe.apply(Proposal(before, (before[0] + 1, *before[1:]), (1.0,) * 7, (2.0,), (1.0,)), optimizer)

    def unscale() -> None:
        penstock.GradScaler(pipe).unscale_(optimizer)

    return {
        "step()": lambda: pipe.step(x, target=x),
        "evaluate()": lambda: pipe.evaluate(x, target=x),
        "predict()": lambda: pipe.predict(x),
        "clip_grad_norm_(1)": lambda: pipe.clip_grad_norm_(1.0),
        "clip_grad_norm_(2)": lambda: pipe.clip_grad_norm_(2.0),
        "grad_norm()": pipe.grad_norm,
        "GradScaler.unscale_()": unscale,
        "record()": lambda: enter(pipe),
        "apply()": apply,
        "save()": lambda: penstock.save(folder / "new", pipe),
        "load()": lambda: penstock.load(folder / "old", pipe),
    }


def run(cases: list[Case], folder: Path, transports: list[str]) -> list[tuple[str, int, str]]:
    """What this rank's call ended with, in each case: kind, culprit and text."""
    found = []
    rank = dist.get_rank()
    for number, case in enumerate(cases):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)))
        group = dist.new_group()
        way = transports[number % len(transports)]
        options: dict[str, Any] = {"transport": way, "timeout": TIMEOUT, "loss_fn": F.mse_loss, "group": group}
        pipe = penstock.Pipeline(model, stages=len(case), microbatches=M, **options)
        calls = make(pipe, folder)
        calls["step()"]()
        if number == 0 and any("load()" in each for each in cases):
            penstock.save(folder / "old", pipe)
        try:
            calls[case[rank]]()
            found.append(("nothing", -1, ""))
        except Exception as error:
            found.append((type(error).__name__, getattr(error, "rank", -1), str(error)))
        pipe.close()
    return found


def in_words(case: Case) -> list[str]:
    """How an error names each rank's call."""
    found = []
    for call in dict.fromkeys(case):
        ranks = [str(rank) for rank, other in enumerate(case) if other == call]
        found.append(
            f"rank {ranks[0]} was in {call}" if len(ranks) == 1 else f"ranks {' and '.join(ranks)} were in {call}"
        )
    return found


def judge(cases: list[Case], told: list[list[tuple[str, int, str]]]) -> list[str]:
    """What is wrong with what the ranks have said."""
    wrong = []
    for number, case in enumerate(cases):
        odd = next((rank for rank, call in enumerate(case) if case.count(call) == 1), 0) if len(case) > 2 else 1
        wanted = f"rank {odd} failed: the ranks are in different calls ({', '.join(in_words(case))}); make each call"
        for rank, each in enumerate(told):
            kind, culprit, text = each[number]
            if kind != PeerFailure.__name__ or culprit != odd or not text.startswith(wanted):
                wrong.append(f"{case}, rank {rank}: {kind} of {culprit}: {text[:600]}")
    return wrong


def table(ranks: int) -> Iterator[Case]:
    """Every pair of calls; on three processes with the odd one on each rank."""
    for one, other in permutations(CALLS, 2):
        if ranks == 2:
            yield one, other
        else:
            for odd in range(ranks):
                yield tuple(other if rank == odd else one for rank in range(ranks))


def check(cases: list[Case], transports: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = on_processes(len(cases[0]), run, cases, Path(folder), transports, limit=30 + 10 * len(cases))
    wrong = judge(cases, told)
    assert not wrong, f"{len(wrong)} of {len(cases) * len(told)}:\n" + "\n".join(wrong)


def test_the_odd_call_is_the_culprit() -> None:
    check([("step()", "evaluate()", "step()"), ("clip_grad_norm_(1)",) * 2 + ("clip_grad_norm_(2)",)], ["shared"])


def train_on_more_batches(longer: int, transport: str, clip: float | None) -> str:
    """`train_steps` with four batches, and with one more on one rank."""
    return train([4 + (rank == longer) for rank in range(2)], transport, [clip, clip])


def train(batches: list[int], transport: str, clips: list[float | None], later: bool = False) -> str:
    """What `train_steps` says to that many batches, and such limits, on each rank; `later` not in the first loop."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    x = torch.ones(4, WIDTH)
    pipe = penstock.Pipeline(
        model,
        stages=2,
        microbatches=M,
        transport=transport,
        timeout=TIMEOUT,
        loss_fn=F.mse_loss,
        group=dist.new_group(),
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    try:
        if later:
            list(pipe.train_steps([(x, x)], optimizer))
        list(pipe.train_steps([(x, x)] * batches[pipe.rank], optimizer, clip=clips[pipe.rank]))
    except PeerFailure as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        pipe.close()
    return "nothing"


@pytest.mark.parametrize(
    ("transport", "longer", "clip"),
    by_turns(ON_PROCESSES, [0, 1], [None, 1e-6], fast=[("shared", 1, None), ("distributed", 0, 1e-6)]),
)
def test_a_rank_that_has_more_batches(transport: str, longer: int, clip: float | None) -> None:
    """If it was rank 1, both ranks waited for the timeout and then told of a deadlock.

    Where clipping bites, all reports of the last step are known, and the shorter rank left its loop without a word.
    """
    for said in on_processes(2, train_on_more_batches, longer, transport, clip):
        assert "rank 1 failed: the ranks are in different calls" in said
        assert f"rank {1 - longer} was in settle(), after the batches of train_steps() so far" in said
        assert f"rank {longer} was in train_steps({'' if clip is None else 'clip=1e-06'})" in said


@pytest.mark.parametrize(
    ("clips", "later"),
    by_turns([[1.0, 2.0], [None, 2.0]], [False, True], fast=[([1.0, 2.0], True), ([None, 2.0], False)], one_in=1),
)
def test_ranks_that_clip_differently(clips: list[float | None], later: bool) -> None:
    """Some would take an update back that others leave as it is, and their messages would no longer belong together.

    The first step of a pipeline ends together, before anything is updated. Later ones are updated before it is known.
    """
    for said in on_processes(2, train, [4, 4], "shared", clips, later):
        assert ("this rank has updated its weights after step" in said) == later
        assert "rank 1 failed: the ranks are in different calls" in said
        assert (
            f"rank 0 was in train_steps({'' if clips[0] is None else 'clip=1.0'}), rank 1 was in train_steps(clip=2.0)"
            in said
        )


@pytest.mark.parametrize("ranks", tiers(2, 3))
def test_calls_of_a_training_loop(ranks: int) -> None:
    usual = {"step()", "evaluate()", "clip_grad_norm_(1)", "save()"}
    check([case for case in table(ranks) if usual.issuperset(case)], ON_PROCESSES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_pairs_of_calls(ranks: int, part: int) -> None:
    check(list(table(ranks))[part::4], ON_PROCESSES)
