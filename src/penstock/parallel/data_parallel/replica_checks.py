"""What would train wrongly without a word, looked for where it costs next to nothing.

Copies of a stage start equal and get the same pipeline. What can still set them apart comes later, from the user's own
loop: a layer that is exchanged, parameters that only one copy freezes, a state that only one loads, an optimizer step
that only one takes, ranks that load different rows. None of that fails by itself: buckets of the same size still add
up, and spread tensors still multiply.

    before a step      no parameter is new; where requires_grad has changed, it has done so on all copies
    at its end         all copies have loaded the same, all or none were changed since the last step, and one parameter,
                       another in each step, has the same values
    after the first    ranks of the tp axis were given the same batch, and whole parameters got the same gradient there
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError, UsageError
from penstock.parallel.axis_link import AxisLink
from penstock.parallel.data_parallel.reduce import Reducer
from penstock.parallel.tensor_parallel.spread import plain_parameters
from penstock.runtime.batch.comparison import different_batches
from penstock.runtime.batch.fingerprint import alike, sample
from penstock.runtime.engine.executor import Executor
from penstock.runtime.optim.norms import local_of

CHANGED = "step() after a change of requires_grad"
SAMPLE = 8  # numbers of a parameter
DRIFT = 1e-3  # Share of the largest: devices of different kinds round differently, and that adds up over a long run.


class ReplicaChecks:
    """The checks of one rank, over links to copies of its stages (dp) and to other parts of its tensors (tp)."""

    def __init__(
        self, executor: Executor, reducer: Reducer, sharded: Iterable[nn.Parameter], links: Mapping[str, AxisLink]
    ) -> None:
        self._executor, self._reducer = executor, reducer
        self._links, self._shards = links, links.get("tp")
        self._trained = [parameter.requires_grad for parameter in reducer.held()]
        self._sharded = list(sharded)
        self._copied = reducer.copied()
        self._turn = 0
        self._sample: tuple[str, list[float], float] | None = None
        self._versions: list[int] | None = None  # Versions count the changes in place.
        self._changed: bool | None = None
        self._loads = 0  # a checksum of what was loaded so far
        self._first = True
        self.apart = False  # what is trained differs, as all that it concerns know: no reduction of theirs would meet

    def before(self) -> None:
        self.apart = False
        self._sample_parameters()
        held = self._reducer.held()
        strangers = self._reducer.strangers(held)
        if strangers:
            raise UsageError(
                f"{len(strangers)} parameters are not those that the pipeline was made with ({strangers[0]}, for "
                f"example), so replicas would train them apart; change the model first, then make the Pipeline and "
                f"the optimizer"
            )
        trained = [parameter.requires_grad for parameter in held]
        if trained != self._trained:
            for word, answers in [(link.word, link.all_gather(CHANGED, trained)) for link in self._links.values()]:
                if any(each != trained for each in answers):
                    self.apart = True
                    counts = ", ".join(f"{word} {number}: {sum(each)}" for number, each in enumerate(answers))
                    raise UsageError(
                        f"the {word}s train different parameters of rank {self._executor.rank} ({counts} of "
                        f"{len(trained)}); set requires_grad alike on every rank"
                    )
            self._trained = trained

    def _sample_parameters(self) -> None:
        if any(parameter._backward_hooks for parameter in self._sharded):
            raise UsageError(
                "a parameter has a hook (register_hook), which ParallelOptions(replicate='fsdp') cannot call: "
                "autograd sees the whole parameter and never its shard; change gradients between step() and "
                "optimizer.step(), or use 'ddp'"
            )
        versions = [parameter._version for _, parameter in self._copied]
        self._changed = None if self._versions is None else versions != self._versions
        self._versions = versions
        if self._copied:
            name, parameter = self._copied[self._turn % len(self._copied)]
            self._turn += 1
            values = local_of(parameter.detach())
            rounding = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
            self._sample = (name, sample(values, SAMPLE), max(DRIFT, 16 * rounding))

    def loaded(self, values: Iterable[Tensor]) -> None:
        """Note that a state was loaded here: all copies must report the same of it."""
        samples = [sample(value.detach(), SAMPLE) for value in values if type(value) in (Tensor, nn.Parameter)]
        self._loads = zlib.crc32(repr(samples).encode(), self._loads + 1)

    def report(self) -> Any:
        """Return what the other copies compare with theirs at the end of a step."""
        return self._loads, self._changed, self._sample

    def same(self, reports: Sequence[Any]) -> None:
        """Compare what every copy reported at the end of a training step."""
        loads, changes, found = zip(*reports, strict=True)
        if len(set(loads)) > 1:
            raise UsageError(
                "the replicas have loaded different states, or not all of them have loaded one; call load_state_dict() "
                "with the same state on every rank"
            )
        if {True, False} <= set(changes):
            listed = ", ".join(f"replica {number}: {'yes' if each else 'no'}" for number, each in enumerate(changes))
            raise UsageError(
                f"since the last step, parameters were changed in some replicas only ({listed}), so they train apart; "
                f"load states, change parameters and step the optimizer alike on every rank"
            )
        samples = [each for each in found if each is not None]
        if any(not samples_alike(samples[0], other) for other in samples[1:]):
            listed = "; ".join(f"replica {number}: {each[1][:3]}" for number, each in enumerate(samples))
            raise UsageError(
                f"{samples[0][0]} has other values in other replicas ({listed}, ...), so they train apart; load "
                f"states, change parameters and step the optimizer alike on every rank"
            )

    def after(self) -> None:
        """Look at the optimizer after a training step, the first one only."""
        if self._shards is None or not self._first:
            return
        norms = {
            name: parameter.grad.norm().item()
            for name, parameter in plain_parameters(self._executor.stages)
            if parameter.grad is not None and type(parameter.grad) is Tensor
        }
        fingerprinted = self._executor.fingerprinted
        given = {} if fingerprinted is None else fingerprinted.details()
        reports = self._shards.exchange(((given, self._loads), norms))
        fault = other_batches([seen for seen, _ in reports]) or other_gradients([norms for _, norms in reports])
        faults = [each for each in self._executor.transport.exchange(fault) if each is not None]
        if faults:
            raise ModelError(faults[0])
        self._first = False


def samples_alike(one: tuple[str, list[float], float], other: tuple[str, list[float], float]) -> bool:
    if one[0] != other[0]:
        return True  # One of them has tried the step once more.
    return alike(one[1], other[1], one[2])


def other_batches(seen: Sequence[Any]) -> str | None:
    given = [each for each, _ in seen]
    alone = {name for each in given for name in each} - set.intersection(*map(set, given))
    if not alone and len({loads for _, loads in seen}) == 1 and not different_batches(given):
        return None
    return (
        "the ranks of the tp axis were given different batches, or loaded different states; they hold parts of the "
        "same tensors and must all get the rows of their replica, as from penstock.ReplicaSampler (torch's "
        "DistributedSampler goes by the world)"
    )


def other_gradients(reports: Sequence[dict[str, float]]) -> str | None:
    for name in dict.fromkeys(name for each in reports for name in each):
        norms = [each.get(name, 0.0) for each in reports]
        if not all(math.isclose(norms[0], other, rel_tol=1e-3, abs_tol=1e-12) for other in norms):
            return (
                f"the gradient of {name} differs between the ranks of the tp axis (norms {norms}): each has seen "
                f"a part of its input only; give its module the style 'sequence', or gather what goes into it"
            )
    return None
