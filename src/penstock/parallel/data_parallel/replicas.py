"""One step of a pipeline that has replicas: what is added, what is told, and how all of them fail together.

All replicas run the same program, each on its own batch, and meet at its sharding actions and at the end of the step.
A replica whose step fails walks the rest of its program without computing, but takes part in every collective on the
way: so the others' collectives end, all replicas learn of the failure at the end of the step, and the next step starts
clean. A replica that cannot even do that (one of its ranks is lost) ends the link instead, and everybody leaves with
its failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from penstock.errors import ModelError, PeerFailure, UsageError
from penstock.parallel.axis_link import AxisLink
from penstock.parallel.data_parallel.gradient_norms import gather_over, spread_norm
from penstock.parallel.data_parallel.reduce import Reducer, make_equal, part_of
from penstock.parallel.data_parallel.replica_checks import ReplicaChecks
from penstock.parallel.data_parallel.sharded import Sharder
from penstock.parallel.group.agreement import agree
from penstock.runtime.engine.executor import Executor
from penstock.runtime.engine.replication import Replication
from penstock.runtime.engine.report import EndedStep, ReplicaReport, StepReport, failure_of, replica_report
from penstock.runtime.loss.evenness import compare_replicas
from penstock.runtime.optim.norms import local_of
from penstock.runtime.transport.failure.peer_failures import after_loss
from penstock.schedule import Action, Op, Schedule, insert_shards

COMPARISONS = 2  # Replicas compare what they measure by, and what their batches weigh.


class Replicas(Replication):
    """This rank's part. `weighing`: when in a step its batch's weight is told, "before", "during" or "never"."""

    sets_aside = True
    is_alone = False

    def __init__(
        self,
        executor: Executor,
        links: Mapping[str, AxisLink],
        reducer: Reducer,
        sharder: Sharder | None,
        weighing: Callable[[], str],
        loss_parallel: bool = False,
    ) -> None:
        self._executor, self._links = executor, links
        self._link, self._shards = links.get("dp"), links.get("tp")
        self._reducer, self._sharder = reducer, sharder
        self._weighing, self._loss_parallel = weighing, loss_parallel
        self._checks = ReplicaChecks(executor, reducer, () if sharder is None else sharder.managed, links)
        self._weighs = False
        self._total: tuple[list[Tensor], Any] | None = None
        self._comparisons = 0  # Number of comparisons that replicas have before them in this step.
        self._failure: PeerFailure | None = None  # Failure of this step.
        self._earlier: list[tuple[nn.Parameter, Tensor | None]] = []
        if sharder is not None:
            sharder.waiting = self._waiting
        if self._link is not None:
            self.replicas, self.index = self._link.size, self._link.index
        self.overlaps = sharder is None and self._shards is None
        self.leads = all(each.index == 0 for each in links.values())

    # -- during a step

    def ready(self) -> None:
        self._checks.before()

    def act(self, action: Action) -> None:
        if self._sharder is not None:
            with self._waiting(str(action)):
                self._sharder.act(action)
        if action.op is Op.REDUCE_GRAD:
            self._reducer.start(action.stage)

    def explain(self, error: BaseException) -> PeerFailure | None:
        return None if self._shards is None else self._shards.explain(error)

    def fail(self, failure: PeerFailure) -> None:
        if self._shards is not None and self._executor.computing:
            self._shards.abort(failure)  # the other parts of these tensors wait for this one, in the middle of a stage
        self._failure = failure
        if self._weighs and self._total is None:
            self.total(0.0)

    def drain(self, action: Action) -> None:
        if action.op in (Op.B, Op.I) and self._executor.stages[action.stage].is_last:
            self._answer()
        if not action.op.is_sharding or (action.op is Op.REDUCE_GRAD and self._checks.apart):
            return
        if self._sharder is not None:
            with self._waiting(str(action)):
                self._sharder.drain(action)
        if action.op is Op.REDUCE_GRAD:
            self._reducer.drain(action.stage)

    def _waiting(self, what: str) -> Any:
        return nullcontext() if self._link is None else self._link.waiting(what)

    def total(self, weight: float) -> Callable[[], float]:
        link = self._link
        if link is None:
            return lambda: weight
        parts = [torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(link.size)]
        mine = torch.full_like(parts[0], weight)
        self._total = parts, dist.all_gather(parts, mine, group=link.group, async_op=True)
        return self._summed

    def _summed(self) -> float:
        assert self._total is not None
        assert self._link is not None
        parts, work = self._total
        self._link.wait(work, "the sum of the batches' weights")
        return sum(part.item() for part in parts)

    def compare(self, value: Any) -> list[Any]:
        if self._link is None:
            return [value]
        self._comparisons -= 1
        answers = self._link.exchange(value)
        for each in answers:
            if isinstance(each, ReplicaReport):
                self._comparisons, self._met = 0, True  # This was its last word in this step.
                raise each.failure or PeerFailure(self._executor.rank, "a replica has no loss in this call; others do")
        return answers

    def _answer(self) -> None:
        """Answer replicas that wait to compare, in a step that has failed here."""
        if self._comparisons and self._link is not None and self._failure is not None:
            self._comparisons, self._met = 0, True
            self._link.exchange(ReplicaReport(failure=self._link.named(self._failure)))

    # -- around it

    @contextmanager
    def step(self, program: Schedule, training: bool) -> Iterator[Self]:
        self._check_links()
        self._begin(program, training)
        try:
            with self._computing:
                if self._shards is not None:
                    self._computing.enter_context(self._shards.inside())
                if self._loss_parallel:
                    self._computing.enter_context(loss_parallel())
                yield self
        except BaseException as error:
            self._report_failure(error)
            self._undo()
            named = self._named(error)
            if named is not error:
                raise named from named.__cause__
            raise

    def end(self, reports: Sequence[StepReport]) -> None:
        self._computing.close()
        self.replica_reports = self._meet(self._summary(reports))
        self._finish()

    def meet(self, ended: EndedStep) -> None:
        link, transport = self._link, self._executor.transport
        self._computing.close()
        if link is None:
            return
        failure = None if ended.failure is None else link.named(ended.failure)
        if failure is not None and transport.broken is not None:
            link.abort(failure)
            return
        mine = self._summary([ended.report])
        mine.failure = failure
        answers = link.exchange(mine)
        self._met = True
        failure, own = next((each.failure for each in answers if each.failure is not None), None), None
        if failure is None:
            self.replica_reports = answers
            try:
                self._finish()
            except (ModelError, UsageError) as error:  # All copies raise it alike; the report notifies the other ranks.
                failure, own = self._failure_of(error, link), error
            else:
                if any(each.loss is not None or each.extra for each in answers):
                    ended.report.copies = [replace(each, counts=[], more=None) for each in answers]
        if failure is not None:
            self._discard()
            self._undo()
            ended.fail(failure, own)

    def _summary(self, reports: Sequence[StepReport]) -> ReplicaReport:
        summary = replica_report(reports, self._count)
        sharded = 0 if self._sharder is None else self._sharder.present
        summary.more = (self._reducer.present, sharded, self._checks.report())
        return summary

    def _begin(self, program: Schedule, training: bool) -> None:
        """Set aside what earlier steps added: it has been reduced."""
        self._count, self._training = program.microbatches, training
        self._computing = ExitStack()  # what holds while this replica computes
        self._total, self._failure, self._met = None, None, False
        self._weighs = self._link is not None and self._weighing() == "before"
        self._comparisons = COMPARISONS if self._weighing() == "during" else 0
        if self._sharder is not None:
            self._sharder.begin()
        self._earlier = []
        if training:
            self._reducer.begin(program, self._executor.rank)
            sharded = () if self._sharder is None else self._sharder.parameters
            for parameter in (*self._reducer.parameters, *sharded):
                self._earlier.append((parameter, parameter.grad))
                parameter.grad = None

    def _meet(self, mine: ReplicaReport) -> list[ReplicaReport]:
        """Meet all replicas at the end of the step; raise the first failure of another."""
        if self._link is None:
            return [mine]
        answers = self._link.exchange(mine)
        self._met = True
        for number, each in enumerate(answers):
            if each.failure is not None and number != self.index:
                raise each.failure
        return answers

    def _finish(self) -> None:
        if self._weighs and self._total is not None:
            self._summed()
        compare_replicas([each.counts for each in self.replica_reports])
        if not self._training:
            return
        self._checks.same([each.more[2] for each in self.replica_reports])
        self._reducer.finish()
        self._checks.after()
        had = 0
        for each in self.replica_reports:
            had |= each.more[0] | each.more[1] << len(self._reducer.parameters)
        for place, (parameter, earlier) in enumerate(self._earlier):
            if not had >> place & 1:
                parameter.grad = earlier
            elif earlier is not None and parameter.grad is not None:
                local_of(parameter.grad).add_(local_of(earlier))
        self._earlier = []

    def _report_failure(self, error: BaseException) -> None:
        """Report that the step has failed here, or that another replica reported so."""
        link, own = self._link, self._executor.transport.broken
        if self._shards is not None and own is not None:
            self._shards.abort(self._failure_of(error))
        if link is None or link.broken is not None:
            return
        failure = self._failure_of(error, link)
        if own is not None:
            link.abort(failure)
            return
        with suppress(PeerFailure):
            if not self._met:
                link.exchange(ReplicaReport(failure=failure))
            self._discard()

    def _discard(self) -> None:
        """End what other replicas have begun with this one in a step that has failed."""
        if self._weighs and self._total is not None:
            self._summed()
        self._reducer.finish(discard=True)

    def _undo(self) -> None:
        """Remove all gradients of a step that failed."""
        if self._sharder is not None:
            self._sharder.reset()
        for parameter, earlier in self._earlier:
            parameter.grad = earlier
        self._earlier = []

    def _failure_of(self, error: BaseException, link: AxisLink | None = None) -> PeerFailure:
        """Return an error of this rank as others, on that link, are told of it."""
        failure = error if isinstance(error, PeerFailure) else failure_of(self._executor.rank, error, None)
        return failure if link is None else link.named(failure)

    def _named(self, error: BaseException) -> BaseException:
        """Add to a failure of this replica that it is one."""
        if not isinstance(error, PeerFailure):
            return error
        named = error
        for link in self._links.values():
            named = link.named(named)
        named.__cause__ = error.__cause__
        return named

    @property
    def broken(self) -> PeerFailure | None:
        losses = (link.broken for link in self._links.values())
        return next((loss for loss in losses if loss is not None), None)

    def _check_links(self) -> None:
        if (loss := self.broken) is not None:
            raise after_loss(loss)

    def same_count(self, count: Callable[[], int]) -> int:
        link = self._link
        if link is None:
            return count()
        self._check_links()

        def describe(error: BaseException) -> PeerFailure:
            failure = self._failure_of(error, link)
            if self._executor.transport.broken is not None:
                link.abort(failure)
            return failure

        return min(agree(count, link.exchange, describe=describe, refuse=lambda _, failure: failure))

    # -- beside steps

    def lowered(self, program: Schedule) -> Schedule:
        return program if self._sharder is None else insert_shards(program, self._sharder.window)

    def part_of(self, value: Any, current: Any) -> Any:
        return part_of(value, current)

    def whole(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        with ExitStack() as stack:
            for link in self._links.values():
                stack.enter_context(link.waiting("the collection of the model"))
            return value.full_tensor()

    def first_has(self, value: Tensor) -> Tensor:
        if self._link is None:
            return value
        copy = value.detach().clone()
        make_equal([copy], self._link)
        return copy

    def loaded(self, values: Sequence[Any]) -> None:
        self._checks.loaded(values)

    def norm(self, gradients: Sequence[Tensor], order: float, foreach: bool | None) -> tuple[float, torch.dtype] | None:
        return spread_norm(self._links, gradients, order, foreach)

    def all_gather(self, call: str, value: Any) -> list[Any]:
        return gather_over(self._links, call, value)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
