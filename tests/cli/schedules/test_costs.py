"""Costs as options of a command."""

from __future__ import annotations

import json

from command import run


def test_costs_can_be_stated_stage_by_stage() -> None:
    result = run("simulate", "gpipe", "-r", 2, "-m", 1, "--forward", "1,2", "--input", 3, "--weight", "0,4", "--json")
    assert json.loads(result.stdout)["makespan"] == 1 + 2 + (3 + 4) + (3 + 0)


def test_messages_take_latency_and_bytes_over_bandwidth() -> None:
    wires = ("--latency", 1, "--bytes", 6, "--bandwidth", 2)
    document = json.loads(run("simulate", "gpipe", "-r", 2, "-m", 1, *wires, "--json").stdout)
    assert document["makespan"] == 1 + (1 + 3) + 1 + 2 + (1 + 3) + 2
