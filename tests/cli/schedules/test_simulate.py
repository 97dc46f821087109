"""`penstock simulate`: prices under stated costs."""

from __future__ import annotations

import json

from command import run

from penstock.schedule import build, simulate, steady_state


def test_simulate_prints_what_the_library_says() -> None:
    result = run("simulate", "1f1b", "-r", 4, "-m", 8)
    assert result.exit_code == 0
    assert "makespan    33\n" in result.stdout
    assert "idle share  27.3 %\n" in result.stdout
    assert "   3      27.3 %                 1            1" in result.stdout
    assert "critical path, 22 computes: 0F0 1F0 2F0 3F0 3B0" in result.stdout


def test_jitter_is_seeded_and_reports_its_spread() -> None:
    options = ("simulate", "1f1b", "--jitter", 0.1, "--draws", 20, "--json")
    first = json.loads(run(*options).stdout)["what_if"]
    assert first == json.loads(run(*options).stdout)["what_if"]
    assert first["mean"] != json.loads(run(*options, "--seed", 1).stdout)["what_if"]["mean"]
    assert first["low"] < first["mean"] < first["high"]
    assert len(first["makespans"]) == 20
    assert "0.1 over 20 draws (seed 0): makespan" in run(*options[:-1]).stdout


def test_steps_back_to_back_are_priced_together_and_the_steady_state_stays() -> None:
    schedule = build("zb-v", 4, 8)
    document = json.loads(run("simulate", "zb-v", "-r", 4, "-m", 8, "--steps", 3, "--json").stdout)
    assert document["steps"] == 3
    assert document["microbatches"] == 8
    assert document["makespan"] == simulate(schedule, steps=3).makespan < 3 * simulate(schedule).makespan
    assert document["steady_idle_share"] == steady_state(schedule).idle < document["idle_share"]
    printed = run("simulate", "zb-v", "-r", 4, "-m", 8, "--steps", 3).stdout
    assert "weight 1; 3 steps back to back\n" in printed
    assert f"makespan    {document['makespan']:g}\n" in printed
    assert "steps back" not in run("simulate", "zb-v", "-r", 4, "-m", 8).stdout


def test_jitter_is_drawn_for_all_steps() -> None:
    options = ("simulate", "1f1b", "--jitter", 0.1, "--draws", 3, "--json")
    one = json.loads(run(*options).stdout)["what_if"]["mean"]
    assert json.loads(run(*options, "--steps", 2).stdout)["what_if"]["mean"] > 1.5 * one
