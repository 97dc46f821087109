"""Run cases on threads of this process, or on processes, and say how each ended."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from processes import on_processes
from transports import buffering

from fuzz.case import Case
from fuzz.program import program
from penstock import errors

__all__ = ["Outcome", "run_on_processes", "run_on_threads"]

REFUSALS = (errors.UsageError, errors.ModelError)  # others are of a run that has gone wrong
GOOD = ("same", "refused", "no case")


@dataclass
class Outcome:
    """How a case ended: same, differs, crashed; refused, as it may be; or no case, because the plain loop fails."""

    kind: str
    text: str = ""
    differences: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        return self.kind not in GOOD

    def like(self, other: Outcome) -> bool:
        """Whether it may be the same defect: a smaller case that ends in this way is worth keeping."""
        return self.kind == other.kind and (self.kind != "crashed" or _first(self.text) == _first(other.text))


def _first(text: str) -> str:
    return text.split(":")[0]


def defined(case: Case) -> dict[str, Any]:
    """What the case's program defines."""
    space: dict[str, Any] = {"__name__": "case"}
    exec(compile(program(case), f"<case {case.seed}>", "exec"), space)
    return space


@contextmanager
def quiet(case: Case) -> Any:
    """Without warnings, which are not what is looked for here; with nothing buffered if the case says so."""
    with warnings.catch_warnings(), buffering(0 if case.where == "threads-0" else None):
        warnings.simplefilter("ignore")
        yield


def plain(space: dict[str, Any]) -> dict[str, Any] | Outcome:
    try:
        found: dict[str, Any] = space["plain"]()
    except Exception as error:
        return Outcome("no case", f"{type(error).__name__}: {error}")
    if not all(bool(tensor.isfinite().all()) for tensor in found.values() if tensor is not None):
        return Outcome("no case", "not finite")
    return found


def piped(case: Case, space: dict[str, Any]) -> dict[str, Any] | Outcome:
    try:
        found: dict[str, Any] = space["piped"]()
    except Exception as error:
        return judged(error, case.refusable)
    return found


def judged(error: Exception, refusable: bool) -> Outcome:
    """An error that says what the library does not take is a refusal, of a case that may be; all others are crashes."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, errors.PeerFailure):
        text = error.cause
        cause = text.removeprefix("it could not build its pipeline: ")
        refused = refusable and cause.startswith(tuple(kind.__name__ for kind in REFUSALS))
        return Outcome("refused" if refused else "crashed", f"{text}\n{error.original_traceback}")
    if refusable and isinstance(error, REFUSALS):
        return Outcome("refused", text)
    if isinstance(error, AssertionError) and "not sprung" in str(error):
        return Outcome("no case", text)
    return Outcome("crashed", text)


def compared(space: dict[str, Any], want: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> Outcome:
    found = [difference for have in ranks for difference in space["differences"](want, have)]
    missing = set(want) - {name for have in ranks for name in have}
    found += [(name, "the pipeline has none") for name in sorted(missing) if "attributes" not in name]
    return Outcome("differs", f"{len(found)} differences", found) if found else Outcome("same")


def run_on_threads(case: Case) -> Outcome:
    with quiet(case):
        space = defined(case)
        want = plain(space)
        if isinstance(want, Outcome):
            return want
        have = piped(case, space)
    return have if isinstance(have, Outcome) else compared(space, want, [have])


def run_on_processes(cases: Sequence[Case]) -> list[Outcome]:
    """All in one launch; they have as many ranks."""
    from fuzz.ranks import run_on_rank  # which has what is above

    (ranks,) = {case.ranks * (2 if case.replicate else 1) for case in cases}
    outcomes: dict[int, Outcome] = {}
    wanted = {}
    for number, case in enumerate(cases):
        with quiet(case):
            want = plain(defined(case))
        if isinstance(want, Outcome):
            outcomes[number] = want
        else:
            wanted[number] = want
    told = on_processes(ranks, run_on_rank, [cases[number] for number in wanted], limit=60 + 30 * len(wanted))
    for place, (number, want) in enumerate(wanted.items()):
        haves = [rank[place] for rank in told]
        worst = [have for have in haves if isinstance(have, Outcome)]
        crashed = [outcome for outcome in worst if outcome.bad]
        if worst:
            outcomes[number] = (crashed or worst)[0]
        else:
            outcomes[number] = compared(defined(cases[number]), want, haves)
    return [outcomes[number] for number in range(len(cases))]
