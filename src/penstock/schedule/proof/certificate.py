"""What a proof says of a program, to be kept beside it: which schedule, what was proved, by which rules.

A certificate is found again from the program in a fraction of the time that the proof takes, so a file that has
one can be seen to be the very program that was proved. It guards against a change by mistake: who changes
a file on purpose can write its certificate too, and only `verify` says more.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.schedule import Schedule

RULES = 2  # goes up with every change of what verify accepts
COMPUTES = (
    "every stage, rank and microbatch is in range",
    "every microbatch has one forward and one backward in each stage",
    "nothing stands before what it needs",
)
ORDER = ("the order of all ranks together ends",)
LINKS = {  # kinds of links: what has a stream, in which one transfer follows another
    "direction": "each direction between two ranks",
    "pair": "both directions between two ranks together",
    "rank": "all transfers of a rank together",
}
PROGRAM = ("the receives of each link are its sends in the same order",)
SHARDING = ("a stage is whole when it computes, and its gradients are reduced once",)


@dataclass(frozen=True)
class Certificate:
    """What `verify` returns: what was proved, of which program, by which rules.

    Attributes:
        digest: A fingerprint of the program.
        proved: What holds for it, one sentence each.
        rules: The version of the rules that it was proved by.
        links: What has a stream of transfers of its own: "direction", "pair" or "rank".
    """

    digest: str
    proved: tuple[str, ...]
    rules: int = RULES
    links: str = "direction"

    def check(self, schedule: Schedule) -> None:
        """Raise `ScheduleError` unless this is the certificate of that very schedule, by today's rules.

        Args:
            schedule: The schedule or program.
        """
        if self.rules != RULES:
            raise ScheduleError(
                f"the certificate was made under rules {self.rules}, but this version has rules {RULES}; verify it "
                f"again"
            )
        found = certificate_of(schedule, self.links)
        if found.digest != self.digest:
            raise ScheduleError(
                f"the certificate is for another schedule ({self.digest[:40]}) than this ({found.digest}): it was "
                "changed after the proof; verify it, and save it again"
            )
        if found != self:
            raise ScheduleError(
                f"the certificate was changed: it lists {len(self.proved)} statements which are not the "
                f"{len(found.proved)} that are proved of such a schedule; verify it, and save it again"
            )


def certificate_of(schedule: Schedule, links: str = "direction") -> Certificate:
    """Return the certificate that a schedule has once it is proved. This proves nothing."""
    import numpy as np

    columns = schedule.columns
    facts = [
        schedule.placement.by_stage,
        schedule.microbatches,
        schedule.topology.edges,
        schedule.forward_only,
        sorted(schedule.recompute),
        sorted(schedule.passes),
        columns.lengths,
        columns.starts.tolist(),
    ]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
    for column in (columns.position, columns.stage, columns.microbatch, columns.peer):
        digest.update(np.ascontiguousarray(column, dtype="<i4").data)
    digest.update(np.ascontiguousarray(columns.op).data)
    lowered = any(op.is_transfer for op in schedule.ops) or "transfers" in schedule.passes
    sharded = any(op.is_sharding for op in schedule.ops)
    ends = f"the program ends with nothing buffered and one stream for {LINKS.get(links)}"
    proved = COMPUTES + ((*PROGRAM, ends) if lowered else ORDER) + (SHARDING if sharded else ())
    return Certificate(digest.hexdigest(), proved, links=links)
