"""The differential fuzz, for developers: `python -m tests.fuzz --cases 500`, from the top of the repository.

Every case is drawn from its seed: a model, a way to cut it, a loss, a batch, a schedule, a transport. It is trained as
a plain loop of gradient accumulation and as a pipeline, for some steps, and what both have computed is compared: every
loss, output, gradient, parameter, buffer and counter, bit for bit where that is promised and else in double precision,
to rounding. A difference, or an error that the plain loop does not have, is shrunk to a small program, which is printed
and stands by itself. A refusal (an error that says what the library does not take) is no difference where it is to be
expected: of models that the library cuts, and of layers with state on two stages; `--refusals` lists them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conftest  # noqa: F401  (threads and kernels as in the tests: before torch)
import torch
from transports import ON_PROCESSES

from fuzz.case import CLASSES, Case, draw
from fuzz.program import program
from fuzz.run import Outcome, run_on_processes, run_on_threads
from fuzz.shrink import shrink

TOGETHER = 20  # cases in one launch of processes


def run(cases: list[Case]) -> list[Outcome]:
    """On what they ask for."""
    if cases[0].where.startswith("threads"):
        return [run_on_threads(case) for case in cases]
    return run_on_processes(cases)


def main() -> int:
    settings = parser().parse_args()
    torch.set_num_threads(1)
    begin, ends, refusals = time.monotonic(), Counter[str](), Counter[str]()
    seeds = range(settings.seed, settings.seed + settings.cases)
    size = 1 if settings.on == "threads" else TOGETHER
    for first in range(0, len(seeds), size):
        cases = [drawn(seed, settings) for seed in seeds[first : first + size]]
        for case, outcome in zip(cases, run(cases), strict=True):
            ends[outcome.kind] += 1
            if outcome.kind in ("refused", "no case"):
                refusals[f"{outcome.kind}: {outcome.text.splitlines()[0][:150]}"] += 1
            if outcome.bad:
                told(case, outcome, settings)
    print(f"{sum(ends.values())} cases on {settings.on} in {time.monotonic() - begin:.0f} s: {dict(ends)}", flush=True)
    if settings.refusals:
        for text, count in refusals.most_common():
            print(f"{count:6d}  {text}")
    return int(any(kind in ends for kind in ("differs", "crashed")))


def drawn(seed: int, settings: argparse.Namespace) -> Case:
    if settings.on == "threads":
        return draw(seed, without=settings.without)
    ranks = 2 if settings.on == "replicas" else settings.ranks
    return draw(seed, settings.transport, ranks, settings.on == "replicas", settings.without)


def told(case: Case, outcome: Outcome, settings: argparse.Namespace) -> None:
    seed, first = case.seed, outcome
    print(f"\n{'=' * 100}\nseed {seed}: {first.kind}: {first.text}", flush=True)
    if not settings.whole:
        case = shrink(case, first, run)
        outcome = run([case])[0]
        print(f"the smallest: {outcome.kind}: {outcome.text}" if outcome.bad else "run again, it did not differ")
        outcome = outcome if outcome.bad else first
    for name, text in outcome.differences[:8]:
        print(f"    {name}: {text}")
    print(f"{case}\n\n{program(case)}", flush=True)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n\n")[2])
    found.add_argument("--cases", type=int, default=200, help="how many (200)")
    found.add_argument("--seed", type=int, default=0, help="of the first; the others follow (0)")
    found.add_argument("--on", choices=("threads", "processes", "replicas"), default="threads")
    found.add_argument("--transport", choices=ON_PROCESSES, default="shared", help="of processes")
    found.add_argument("--ranks", type=int, default=2, help="how many processes (2)")
    found.add_argument("--without", nargs="*", default=(), choices=CLASSES, help="what to leave out")
    found.add_argument("--refusals", action="store_true", help="list what was refused, and what is no case")
    found.add_argument("--whole", action="store_true", help="print differences as they are, without shrinking")
    return found


if __name__ == "__main__":
    sys.exit(main())
