"""The examination: which checks are made, in which order, and what each outcome means.

Correct before fast: first every family against a plain loop, then the order of messages as the backend has it, then a
death; only then what a step and a link cost. Every check has a time limit of its own (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.errors import UsageError
from penstock.schedule.builders import FAMILIES, family
from penstock.tools.doctor import checks, speed
from penstock.tools.doctor.findings import Finding
from penstock.tools.doctor.machine import device_count, device_type
from penstock.tools.doctor.ranks import Answers, RankGroup

MOST = 8  # ranks, unless more are asked for: two minutes are enough for those
LIMIT = 45.0  # seconds of a check
PER_CORE = 8  # The most ranks that a core of a CPU is asked to run at a time.
READS = 1  # A step may read once, at its end.
# Share of the shorter of transfer and kernels that the longer should hide.
HIDDEN = 0.5
BOUND = ("1f1b", "interleaved-1f1b", "zb-v")  # families that send in both directions at the same time


def training_families(names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the families to check, by their own names; all that train unless some are named."""
    found = tuple(family(name).name for name in names) or tuple(FAMILIES)
    without = [name for name in names if not family(name).trains]
    if without:
        raise UsageError(f"{without[0]} has no backward, and doctor compares gradients; leave it out")
    return tuple(name for name in found if FAMILIES[name].trains)


def ranks_to_try(most: int | None) -> tuple[int, ...]:
    """Return with how many ranks the families are checked: two, and as many as there are devices or are asked for."""
    kind = device_type()
    there = device_count(kind)
    if most is not None and kind != "cpu" and most > there:
        raise UsageError(f"--ranks {most}: this machine has {there} devices of type {kind}, and each rank needs one")
    if most is not None and kind == "cpu" and most > PER_CORE * there:
        raise UsageError(
            f"--ranks {most}: this machine has {there} cores, enough for {PER_CORE * there} ranks at a time"
        )
    most = most or min(there, MOST)
    if most < 2:
        raise UsageError(f"a pipeline needs two devices, and this machine has {there} of type {kind}; hide it to "
                         "examine the CPU (CUDA_VISIBLE_DEVICES= penstock doctor)")  # fmt: skip
    return (2,) if most == 2 else (2, most)


def examine(families: Sequence[str], sizes: Sequence[int]) -> Iterator[Finding]:
    """Make all checks, and yield what came of each as soon as it is known."""
    kind = device_type()
    for size in sizes:
        with RankGroup(size, kind) as group:
            for name in families:
                answers = group.run(checks.compare_with_plain_loop, name, limit=LIMIT)
                yield _of(f"{name} on {size}", answers, _difference)
    if kind != "cpu":  # gloo has tags, and no communicators that are bound to a device
        with RankGroup(sizes[-1], kind, bound=True) as group:
            for name in (each for each in BOUND if each in families):
                answers = group.run(checks.compare_with_plain_loop, name, limit=LIMIT)
                yield _of(f"{name} on {sizes[-1]}, device_id=", answers, _difference)
    with RankGroup(1, kind) as group:
        yield _of("threads", group.run(checks.compare_on_threads, sizes[-1], limit=LIMIT), _difference)
    yield from _examine_behaviour(kind, sizes[-1])


def _examine_behaviour(kind: str, size: int) -> Iterator[Finding]:
    with RankGroup(size, kind) as group:
        answers = group.run(checks.survive_a_death, limit=LIMIT)
        yield _judge_death(answers, size - 1)
        yield _of("host reads", group.run(checks.count_host_reads, limit=LIMIT), _host_reads)
        yield _of("products", group.run(speed.measure_products, limit=LIMIT), _products)
        yield _of("links", group.run(speed.measure_links, limit=LIMIT), _links)
        yield _of("overlap", group.run(speed.measure_overlap, limit=LIMIT), _overlap)


Judge = Callable[[str, dict[int, dict[str, Any]]], Finding]


def _of(check: str, answers: Answers, judge: Judge) -> Finding:
    if answers.complaint:
        return Finding(check, "FAIL", answers.complaint, details=answers.details)
    return judge(check, answers.figures)


def _difference(check: str, figures: dict[int, dict[str, Any]]) -> Finding:
    worst = max(each["difference"] for each in figures.values())
    text = "bit for bit the plain loop" if worst == 0 else f"within {worst:.1e} of the plain loop"
    return Finding(check, "PASS", text, {"difference": worst})


def _judge_death(answers: Answers, last: int) -> Finding:
    """Judge whether the last rank was killed and all others returned."""
    check = "a killed rank"
    missing = {rank: how for rank, how in answers.missing.items() if rank != last}
    if answers.errors or missing or "SIGKILL" not in answers.missing.get(last, ""):
        text = Answers(errors=answers.errors, missing=missing or answers.missing).complaint
        return Finding(check, "FAIL", text or f"rank {last} was to be killed, and was not", details=answers.details)
    seconds = max(each["seconds"] for each in answers.figures.values())
    if seconds > checks.NAMED_WITHIN:
        text = f"named by all others after {seconds:.1f} s; at most {checks.NAMED_WITHIN:.0f} s are promised"
        return Finding(check, "FAIL", text, {"seconds": seconds})
    text = f"named by all others in {seconds:.1f} s, and their devices go on"
    return Finding(check, "PASS", text, {"seconds": seconds})


def _host_reads(check: str, figures: dict[int, dict[str, Any]]) -> Finding:
    worst = max(figures.values(), key=lambda each: int(each["reads"]))
    reads = worst["reads"]
    if reads <= READS:
        return Finding(check, "PASS", f"{reads} per step and rank", worst)
    text = f"{reads} per step and rank, and each stops the host ({', '.join(worst['operations'])}); {READS} expected"
    return Finding(check, "WARN", text, worst)


def _products(check: str, figures: dict[int, dict[str, Any]]) -> Finding:
    slowest = min(figures.values(), key=lambda each: float(each["flops"]))
    found = {**slowest, "devices": len(figures), "memory": min(each["memory"] for each in figures.values())}
    text = (
        f"{found['flops'] / 1e12:.3g} TFLOP/s in {found['dtype']} on each of {len(figures)} devices at once, "
        f"{found['bandwidth'] / 1e9:.3g} GB/s of their {found['memory'] / 1e9:.3g} GB of memory"
    )
    return Finding(check, "INFO", text, found)


def _links(check: str, figures: dict[int, dict[str, Any]]) -> Finding:
    pairs = {pair: found for each in figures.values() for pair, found in each["pairs"].items()}
    slowest = min(pairs, key=lambda pair: float(pairs[pair]["bandwidth"]))
    fastest = max(pairs, key=lambda pair: float(pairs[pair]["bandwidth"]))
    latency = max(each["latency"] for each in pairs.values())
    speeds = " to ".join(f"{pairs[pair]['bandwidth'] / 1e9:.3g}" for pair in dict.fromkeys((slowest, fastest)))
    text = f"{speeds} GB/s (slowest: ranks {slowest.replace('-', ' and ')}), latency at most {latency * 1e6:.0f} us"
    return Finding(check, "INFO", text, {"pairs": pairs})


def _overlap(check: str, figures: dict[int, dict[str, Any]]) -> Finding:
    found = min((figures[rank] for rank in (0, 1)), key=lambda each: float(each["hidden"]))
    text = f"{found['hidden']:.0%} of a transfer is hidden by kernels that take as long"
    # On CPUs, transfers and kernels share the cores.
    enough = found["hidden"] >= HIDDEN or device_type() == "cpu"
    return Finding(check, "INFO" if enough else "WARN", text, found)
