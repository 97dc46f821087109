"""A step that one rank has run to its end, and what came of it on all ranks once they have told each other.

Most steps end on all ranks together: the reports are exchanged at once, and all ranks raise the same error or none
does. Where steps overlap, a rank posts its report, goes on to the next step, and looks at the reports of the others
later. Both ways are the same two moments, `post` and `reports`, with nothing or a step in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import PeerFailure
from penstock.runtime.batch.comparison import Readers, different_batches, unlike
from penstock.runtime.batch.fingerprint import GivenBatch
from penstock.runtime.engine.report import StepReport, what_went_wrong
from penstock.runtime.transport import Transport
from penstock.runtime.transport.failure.peer_failures import with_report


class EndedStep:
    """What one rank has to say of a step, and what it needs to understand what the others say.

    `failure` is why the step failed here, and `own` the exception of this rank that was the reason, if there was one.
    `computed`: the step has come to its first action. `forget` is called if the step has failed anywhere.
    """

    def __init__(
        self,
        transport: Transport,
        report: StepReport,
        failure: PeerFailure | None,
        own: BaseException | None,
        *,
        sampled: GivenBatch | None,
        readers: Readers | None,
        computed: bool,
        forget: Callable[[], None],
    ) -> None:
        self.report = report
        self.failure = report.failure = failure
        self._transport = transport
        self._own = own
        self._sampled, self._readers = sampled, readers
        self._computed = computed
        self._forget = forget
        self.told: list[StepReport] = []  # by all ranks, once that is known
        self._collect: Callable[[], list[Any]] | None = None
        if sampled is not None and not (own and sampled.pending):  # a device that failed is not asked any more
            report.fingerprint = sampled.fingerprint()

    @property
    def interrupt(self) -> BaseException | None:
        """What the user, and no fault, has ended the step by on this rank, if that is so."""
        return self._own if isinstance(self._own, (KeyboardInterrupt, SystemExit)) else None

    def post(self) -> None:
        """Say what this rank has to, and wait for nobody."""
        self._collect = self._transport.post_exchange(self.report)

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
                raise (lost if lost.report else with_report(lost, doing)) from own
            wrong = what_went_wrong(told, batches, self._readers)
            if wrong is None:
                return told
            self._forget()
            if own is not None and (not self._computed or isinstance(own, (KeyboardInterrupt, SystemExit))):
                raise own  # a wrong batch is the caller's error, and no rank's failure here
            raise wrong from own
        finally:
            del own  # an error that its own frame holds would keep the whole step alive

    def _compare_batches(self, reports: list[StepReport]) -> str:
        """How the batches of the ranks differ, in words; empty where they do not, as nearly always."""
        fingerprints = [report.fingerprint for report in reports]
        odd = [] if fingerprints.count(fingerprints[0]) == len(fingerprints) else unlike(fingerprints)
        if not odd:
            return ""
        return different_batches(self._transport.exchange({} if self._sampled is None else self._sampled.details(odd)))
