"""`penstock doctor`: whether pipelines are right and fast on this machine, check by check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import guarded, working, write, write_json
from penstock.cli.source import AsJson, count, option
from penstock.view.figures import counted
from penstock.writing import write_whole

Ranks = Annotated[int | None, count("The most ranks (default: devices, up to 8).", "--ranks", "-r", least=2)]
Families = Annotated[str | None, option("Only these families (default: all).", "--families", metavar="NAME,NAME")]
Out = Annotated[Path, option("Where everything is written, to attach to an issue.", "--out", metavar="FILE")]
ClusterOut = Annotated[
    Path | None, option("Write this machine as a cluster for penstock plan.", "--cluster", metavar="FILE")
]


@guarded
def doctor(
    ranks: Ranks = None,
    families: Families = None,
    out: Out = Path("penstock-doctor.json"),
    cluster: ClusterOut = None,
    as_json: AsJson = False,
) -> None:
    """Check that pipelines are right on this machine: its devices, its backend and its links.

    Takes about two minutes. Every family is compared with a plain loop, on two ranks and on all; a rank is killed;
    reads by the host are counted; devices and links are measured. Exit code 1 when a check fails.
    """
    with working("loading torch"):
        from penstock.tools.doctor.examine import examine, ranks_to_try, training_families  # loads torch
        from penstock.tools.doctor.findings import Examination
        from penstock.tools.doctor.machine import describe_machine
    names = training_families(tuple(families.split(",")) if families else ())
    sizes = ranks_to_try(ranks)
    machine = describe_machine()
    if not as_json:
        write(f"{counted(len(machine['devices']), 'device')} ({machine['device']}), {machine['backend']}, "
              f"torch {machine['torch']}, penstock {machine['penstock']}")  # fmt: skip
    findings = []
    with working("examining"):
        for each in examine(names, sizes):
            findings.append(each)
            if not as_json:
                write(f"  {each.outcome}  {each.check:<24} {each.text}")
    examination = Examination(machine, tuple(findings))
    write_whole(out, json.dumps(examination.document(), indent=2) + "\n")
    if cluster is not None and (text := examination.cluster()) is not None:
        write_whole(cluster, text)
    count, failed = len(findings), len(examination.failed)
    if as_json:
        write_json(examination.document())
    else:
        verdict = f"{counted(failed, 'check')} of {count} failed" if failed else f"{count} checks, none failed"
        write(f"{verdict}; everything that is known is in {out}")
    if failed:
        raise typer.Exit(1)
