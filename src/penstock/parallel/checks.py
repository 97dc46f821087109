"""What would train wrongly without a word, looked for where it costs next to nothing.

Copies of a stage start equal and get the same pipeline. What can still set them apart comes later, from the user's own
loop: a layer that is exchanged, parameters that only one copy freezes, ranks that load different rows. None of that
fails by itself: buckets of the same size still add up, and spread tensors still multiply.

    before a step      no parameter is new; where requires_grad has changed, it has done so on all copies
    after the first    ranks of the tp axis were given the same batch, and whole parameters got the same gradient there
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.errors import ModelError, UsageError
from penstock.parallel.link import Link
from penstock.parallel.reduce import Reducer
from penstock.parallel.tensor import plain_parameters
from penstock.runtime.executor import Executor

__all__ = ["Checks"]

CHANGED = "step() after a change of requires_grad"


class Checks:
    """Of one rank, with the links to the copies of its stages (dp) and to the other parts of its tensors (tp)."""

    def __init__(self, executor: Executor, reducer: Reducer, link: Link | None, shards: Link | None) -> None:
        self._executor = executor
        self._reducer = reducer
        self._links = [each for each in (link, shards) if each is not None]
        self._shards = shards
        self._trained = reducer.trained()
        self._first = True
        self.apart = False  # what is trained differs, as all that it concerns know: no reduction of theirs would meet

    def before(self) -> None:
        """Before a training step."""
        self.apart = False
        strangers = self._reducer.strangers()
        if strangers:
            raise UsageError(
                f"{len(strangers)} parameters are not those that the pipeline was made with ({strangers[0]}, for one), "
                f"so replicas would train them apart; change the model first, then make the Pipeline and the optimizer"
            )
        trained = self._reducer.trained()
        if trained != self._trained:
            told = [(link.word, link.told(CHANGED, trained)) for link in self._links]
            for word, answers in told:
                if any(each != trained for each in answers):
                    self.apart = True
                    counts = ", ".join(f"{word} {number}: {sum(each)}" for number, each in enumerate(answers))
                    raise UsageError(
                        f"the {word}s train different parameters of rank {self._executor.rank} ({counts} of "
                        f"{len(trained)}); set requires_grad alike on every rank"
                    )
            self._trained = trained

    def after(self) -> None:
        """After a training step, the first one only."""
        if self._shards is None or not self._first:
            return
        self._first = False
        norms = {
            name: parameter.grad.norm().item()
            for name, parameter in plain_parameters(self._executor.stages)
            if parameter.grad is not None and type(parameter.grad) is Tensor
        }
        told = self._shards.told("step()", (self._executor.report.seen, norms))
        fault = _other_batches([seen for seen, _ in told]) or _other_gradients([norms for _, norms in told])
        faults = [each for each in self._executor.transport.exchange(fault) if each is not None]
        if faults:
            raise ModelError(faults[0])


def _other_batches(seen: Sequence[Any]) -> str | None:
    if all(each == seen[0] for each in seen):
        return None
    return (
        "the ranks of the tp axis were given different batches; they hold parts of the same tensors and must all get "
        "the rows of their replica, as from penstock.ReplicaSampler (torch's DistributedSampler goes by the world)"
    )


def _other_gradients(told: Sequence[dict[str, float]]) -> str | None:
    for name in dict.fromkeys(name for each in told for name in each):
        norms = [each.get(name, 0.0) for each in told]
        if not all(math.isclose(norms[0], other, rel_tol=1e-3, abs_tol=1e-12) for other in norms):
            return (
                f"the gradient of {name} differs between the ranks of the tp axis (norms {norms}): each has seen "
                f"a part of its input only; give its module the style 'sequence', or gather what goes into it"
            )
    return None
