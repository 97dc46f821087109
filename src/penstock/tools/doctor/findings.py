"""What an examination found, as values: for a table, for JSON, and as a cluster that `penstock plan` reads."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from penstock.planner.cluster import Cluster, Device, Interconnect
from penstock.planner.writing import to_toml

Outcome = Literal["PASS", "WARN", "FAIL", "INFO"]


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: What was checked, such as `"zb-v on 2"`.
        outcome: `PASS`; `WARN` for what works, but slowly; `FAIL`; or `INFO` for a figure without a limit.
        text: One line: the figures, or what went wrong.
        figures: The figures as numbers.
        details: Of a failure, everything that is known: tracebacks, and what ranks wrote before they ended.
    """

    check: str
    outcome: Outcome
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    details: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings, in the order in which they were made, and the machine they are about."""

    machine: Mapping[str, Any]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The checks that did not pass."""
        return tuple(each for each in self.findings if each.outcome == "FAIL")

    def document(self) -> dict[str, Any]:
        """Return everything as plain values, to attach to an issue."""
        return {
            "machine": dict(self.machine),
            "passed": not self.failed,
            "findings": [asdict(each) for each in self.findings],
        }

    def cluster(self) -> str | None:
        """Return this machine as a cluster for `penstock plan`, in TOML; None where it could not be measured."""
        figures = {each.check: each.figures for each in self.findings}
        product, links = figures.get("products"), figures.get("links")
        if not product or not links or not links["pairs"]:
            return None
        bandwidth, latency = (
            statistics.median(pair[name] for pair in links["pairs"].values()) for name in ("bandwidth", "latency")
        )
        # A large product reached the peak, so the efficiency is 1.
        device = Device(product["memory"], peak=product["flops"], efficiency=1.0, bandwidth=product["bandwidth"])
        name, devices = str(self.machine["device"]), product["devices"]
        cluster = Cluster(name, 1, devices, device=device, inside=Interconnect(bandwidth, latency))
        title = f"# Measured by penstock doctor on {devices} devices of one host, in {product['dtype']}.\n"
        return title + to_toml(cluster)
