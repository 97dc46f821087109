"""What every rank reports at the end of a step, and what all ranks make of it: one error, or the user's result.

A rank ends a step with an `EndedStep`. Most steps end on all ranks together: the reports are exchanged at once, and all
ranks raise the same error or none does. Where steps overlap, a rank posts its report, goes on to the next step, and
looks at the reports of the others later. Both ways are the same two moments, `post` and `reports`, with nothing or a
step in between. The reports of a pipeline's ranks are summed up in a `ReplicaReport`, and those of all replicas in the
`StepResult` that the user gets.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.errors import MessageError, ModelError, PeerFailure, RunError, UsageError
from penstock.runtime.batch.comparison import Readers, different_batches, left_out, unlike
from penstock.runtime.batch.fingerprint import BatchFingerprint, FingerprintedBatch, Key
from penstock.runtime.engine.recorder import WallStart
from penstock.runtime.messages import plain
from penstock.runtime.transport import Transport
from penstock.runtime.transport.failure.peer_failures import with_report
from penstock.schedule import Action, Span


@dataclass
class StepReport:
    """What one rank has to say at the end of a step; every rank gets every rank's."""

    extra: dict[str, float] = field(default_factory=dict)  # named losses, summed over microbatches
    loss: float | None = None  # of the batch, from the rank of the last stage
    losses_by_number: list[float] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    failure: PeerFailure | None = None
    progress: str = ""
    rows: int | None = None  # of the batch that this rank was given
    steps: int | None = None  # that this rank has completed
    fingerprint: BatchFingerprint | None = None  # what this rank was given
    spans: list[Span] | None = None
    wall_start: WallStart | None = None  # of a step that is recorded
    ended: float = 0.0  # when all was computed and sent
    norm: tuple[float, torch.dtype] | str | None = None  # of gradients here, where the update depends on all
    copies: list[ReplicaReport] = field(default_factory=list)  # the losses of this rank in each replica, if it has any
    counts: list[Any] = field(default_factory=list)  # what an entry of each term of the loss counts, for other replicas


plain.register(WallStart, start=float, optimizer=float)
plain.register(Span, rank=int, action=Action, start=float, end=float, wait=float)
plain.register(
    StepReport,
    extra=dict,
    loss=float | None,
    losses_by_number=list,
    dtype=torch.dtype,
    failure=PeerFailure | None,
    progress=str,
    rows=int | None,
    steps=int | None,
    fingerprint=tuple | None,
    spans=list | None,
    wall_start=WallStart | None,
    ended=float,
    norm=tuple | str | None,
    copies=list,
    counts=list,
)


def failure_of(rank: int, error: BaseException, action: Action | None) -> PeerFailure:
    """An error of this rank as the others are told of it."""
    return PeerFailure(
        rank,
        _in_words(error),
        stage=None if action is None else action.stage,
        action=None if action is None else str(action),
        microbatch=None if action is None else action.microbatch,
        original_traceback="".join(traceback.format_exception(error)),
    )


def note_steps(error: BaseException, steps: int | None) -> None:
    """How far training was when a message was not the expected one: messages count exchanges, and users count steps."""
    if steps is not None:
        error.add_note(f"on this rank, {steps} training steps of the pipeline were complete by then")


class EndedStep:
    """What one rank has to say of a step, and what it needs to understand what the others say.

    `failure` is why the step failed here, and `own` the exception of this rank that was the reason, if there was one.
    `computed`: the step has come to its first action. `forget` is called if the step has failed anywhere,
    `leave` when that is known.
    """

    def __init__(
        self,
        transport: Transport,
        report: StepReport,
        failure: PeerFailure | None,
        own: BaseException | None,
        *,
        fingerprinted: FingerprintedBatch | None,
        readers: Readers | None,
        computed: bool,
        forget: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        self.report = report
        self.failure = report.failure = failure
        self._transport = transport
        self._own = own
        self._fingerprinted, self._readers = fingerprinted, readers
        self._computed = computed
        self._forget, self._leave = forget, leave
        self.told: list[StepReport] = []  # by all ranks, once that is known
        self._collect: Callable[[], list[Any]] | None = None
        if fingerprinted is not None and not (
            own and fingerprinted.pending
        ):  # a device that failed is not asked any more
            report.fingerprint = fingerprinted.fingerprint()

    @property
    def interrupt(self) -> BaseException | None:
        """What the user, and no fault, has ended the step by on this rank, if that is so."""
        return self._own if isinstance(self._own, (KeyboardInterrupt, SystemExit)) else None

    def fail(self, failure: PeerFailure, own: BaseException | None = None) -> None:
        """The step has failed here after all, before its report is posted."""
        self.failure = self.report.failure = failure
        self._own = self._own or own

    def post(self) -> None:
        """Say what this rank has to, and wait for nobody."""
        self._collect = self._transport.post_exchange(self.report)

    def known_reports(self) -> list[StepReport] | None:
        """The reports of all ranks, if they are here already and nothing is wrong. Waits for nobody."""
        told = self._transport.known_answers()
        if told is None or _unlike(told) or what_went_wrong(told, readers=self._readers) is not None:
            return None
        return told

    def reports(self) -> list[StepReport]:
        """The reports of all ranks, or what went wrong anywhere: the same error on all of them."""
        own, self._own = self._own, None
        try:
            try:
                told = self._transport.exchange(self.report) if self._collect is None else self._collect()
                self.told = told
                batches = self._compare_batches(told)
            except PeerFailure as lost:
                mine, ranks = self._transport.rank, range(self._transport.ranks)
                doing = [self.report.progress if rank == mine else "no answer" for rank in ranks]
                self._forget()
                named = lost if lost.report else with_report(lost, doing)
                if isinstance(own, (KeyboardInterrupt, SystemExit)):
                    raise own from named
                if own is not None:
                    named.add_note(f"rank {mine} had failed by itself before that: {_in_words(own)}")
                raise named from own
            except MessageError as error:
                note_steps(error, self.report.steps)
                raise
            wrong = what_went_wrong(told, batches, self._readers)
            if wrong is None:
                return told
            self._forget()
            if own is not None and (not self._computed or isinstance(own, (KeyboardInterrupt, SystemExit))):
                raise own  # a wrong batch is the caller's error, and no rank's failure here
            raise wrong from own
        finally:
            self._leave()
            del own  # an error that its own frame holds would keep the whole step alive

    def _compare_batches(self, reports: list[StepReport]) -> str:
        """How the batches of the ranks differ, in words; empty where they do not, as nearly always."""
        odd = _unlike(reports)
        if not odd:
            return ""
        return different_batches(
            self._transport.exchange({} if self._fingerprinted is None else self._fingerprinted.details(odd))
        )


def _unlike(reports: Sequence[StepReport]) -> list[Key]:
    """The arguments that differ between ranks."""
    fingerprints = [report.fingerprint for report in reports]
    return [] if fingerprints.count(fingerprints[0]) == len(fingerprints) else unlike(fingerprints)


def what_went_wrong(
    reports: Sequence[StepReport], batches: str = "", readers: Readers | None = None
) -> Exception | None:
    """The one error that every rank raises after a step, or None: the same everywhere, since all have all reports.

    `batches` says how the batches of the ranks differ, if they do. That is then what is wrong, whatever failed by it.
    """
    failures = {rank: report.failure for rank, report in enumerate(reports) if report.failure is not None}
    batches = _different_sizes(reports) or batches
    if not failures:
        apart = _different_steps(reports)
        if apart:
            return RunError(apart)
        fingerprints = [report.fingerprint for report in reports]
        if not batches and readers is not None and fingerprints.count(fingerprints[0]) < len(fingerprints):
            batches = left_out(fingerprints, readers)
        return ModelError(batches) if batches else None
    origins = [failed for rank, failed in failures.items() if failed.rank == rank]
    cause = (origins or list(failures.values()))[0]
    doing = [
        report.progress + (f", failed: {failed.cause}" if failed in origins else "")
        for report, failed in zip(reports, map(failures.get, range(len(reports))), strict=True)
    ]
    failure = with_report(cause, doing)
    return ModelError(f"{batches}\nin this step, {failure}") if batches else failure


def _different_sizes(reports: Sequence[StepReport]) -> str:
    """Batches that are not of one size are not one batch, even where all shapes happen to fit."""
    sizes = {rank: report.rows for rank, report in enumerate(reports) if report.rows is not None}
    if len(set(sizes.values())) < 2:
        return ""
    listed = ", ".join(f"rank {rank}: {rows} rows" for rank, rows in sizes.items())
    return f"the ranks were given batches of different size ({listed}); pass the same batch on every rank"


def _different_steps(reports: Sequence[StepReport]) -> str:
    """A step is complete on all ranks or on none, unless one was stopped by force between the others' ends and its."""
    steps = {rank: report.steps for rank, report in enumerate(reports) if report.steps is not None}
    if len(set(steps.values())) < 2:
        return ""
    listed = ", ".join(f"rank {rank}: {count}" for rank, count in steps.items())
    return (
        f"the ranks have not completed the same number of steps ({listed}), so that their gradients and random numbers "
        f"do not belong together; load a checkpoint on every rank, or make the Pipeline anew"
    )


def _in_words(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError) and torch.accelerator.is_available():
        held = torch.accelerator.memory_allocated() / 2**20
        return f"{type(error).__name__}: {error} ({held:.0f} MiB are allocated on this rank's device)"
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an error that cannot even be printed must still be told
        return type(error).__name__


# -- what the user gets


@dataclass
class ReplicaReport:
    """What one replica has to say at the end of a step."""

    failure: PeerFailure | None = None
    loss: float | None = None  # its part of the batch's loss
    dtype: torch.dtype = torch.float32
    extra: dict[str, float] = field(default_factory=dict)  # named losses, summed over its microbatches
    count: int = 0  # of its microbatches
    counts: list[Any] = field(default_factory=list)  # what an entry of each term of the loss counts
    more: Any = None


plain.register(
    ReplicaReport,
    failure=PeerFailure | None,
    loss=float | None,
    dtype=torch.dtype,
    extra=dict,
    count=int,
    counts=list,
    more=object,
)


def replica_report(reports: Sequence[StepReport | ReplicaReport], count: int) -> ReplicaReport:
    """All ranks of one replica, together."""
    summary = ReplicaReport(count=count)
    for report in reports:
        if report.loss is not None:
            summary.loss, summary.dtype, summary.counts = report.loss, report.dtype, report.counts
        for name, value in report.extra.items():
            summary.extra[name] = summary.extra.get(name, 0.0) + value
    return summary


def all_replicas(reports: Sequence[StepReport], count: int) -> list[ReplicaReport]:
    """All replicas, from what each rank of this one has heard of its copies; without replicas, this one."""
    copies = [report.copies for report in reports if report.copies]
    if not copies:
        return [replica_report(reports, count)]
    return [replica_report(ranks, ranks[0].count) for ranks in zip(*copies, strict=True)]


@dataclass(frozen=True)
class StepResult:
    """What a step or an evaluation returns: the same on every rank, except for `output`.

    ::

        result = pipe.step(x, target=y)
        print(f"{result.loss:.3f}")

    Attributes:
        loss: The loss of the whole batch, over all replicas. It has no graph: gradients are already computed.
        losses: One loss per microbatch of this replica, in order.
        extra_losses: The mean of each loss that stages passed to `add_loss`, by name.
        output: The model's output for the batch, if it was asked for, on the rank of the last stage.
    """

    loss: Tensor | None
    losses: tuple[Tensor, ...] = ()
    extra_losses: Mapping[str, float] = field(default_factory=dict)
    output: Any = None


class _LossValue(Tensor):
    """A loss to look at: in all but `backward()` a plain tensor, which is what any operation makes of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "this loss is a number without a graph: step() has computed all gradients already, so call "
            "optimizer.step() next; evaluate() computes none"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def loss_values(values: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Losses that know why they have no backward."""
    return tuple(value.as_subclass(_LossValue) for value in values)


def result_of(reports: Sequence[StepReport], replicas: Sequence[ReplicaReport], output: Any) -> StepResult:
    """What the user gets: the losses of this replica's microbatches, and what all replicas make together."""
    losses: tuple[torch.Tensor, ...] = ()
    for report in reports:
        if report.loss is not None:
            losses = torch.tensor(report.losses_by_number, dtype=report.dtype, device="cpu").unbind()
    sums = [each.loss for each in replicas if each.loss is not None]
    extra: dict[str, float] = {}
    for each in replicas:
        for name, value in each.extra.items():
            extra[name] = extra.get(name, 0.0) + value
    count = sum(each.count for each in replicas)
    extra = {name: value / count for name, value in extra.items()}
    total = torch.tensor(sum(sums[1:], sums[0]), dtype=replicas[0].dtype, device="cpu") if sums else None
    return StepResult(None if total is None else loss_values([total])[0], loss_values(losses), extra, output)
