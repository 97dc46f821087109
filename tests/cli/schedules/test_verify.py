"""`penstock verify`: proofs, and every fault with its place."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from command import run, swapped

from penstock.schedule import FAMILIES, build, lower, verify
from penstock.schedule.proof.certificate import LINKS


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_proved(name: str) -> None:
    result = run("verify", name, "-r", 3, "-m", 4)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"proved: {name}: 3 ranks")
    assert "no deadlock" in result.stdout


def test_a_file_of_computes_is_proved_with_its_transfers_added(tmp_path: Path) -> None:
    build("1f1b", 2, 2).save(tmp_path / "computes.csv")
    result = run("verify", tmp_path / "computes.csv", "--ranks", 2, "--microbatches", 2, "--stages-per-rank", 1)
    assert result.exit_code == 0
    assert "8 computes" in result.stdout
    assert "8 transfers added here: 4 messages" in result.stdout
    document = json.loads(run("verify", tmp_path / "computes.csv", "--json").stdout)
    certificate = document.pop("certificate")
    assert certificate["digest"] == verify(lower(build("1f1b", 2, 2))).digest
    assert document == {
        "proved": True,
        "name": "",
        "ranks": 2,
        "stages": 2,
        "microbatches": 2,
        "computes": 8,
        "transfers": 8,
        "transfers_added": True,
        "sharding": 0,
        "messages": 4,
        "faults": [],
        "steps": 1,
    }


def test_a_swapped_send_is_named_with_rank_position_and_action(tmp_path: Path) -> None:
    path = swapped(tmp_path / "bad.csv")
    result = run("verify", path)
    assert result.exit_code == 1
    assert result.stdout.startswith("bad.csv: 2 ranks, 2 stages, 3 microbatches: ")
    assert "rank 0, position 1, 0SEND_F1: stands before 0F1, which it needs" in result.stdout
    document = json.loads(run("verify", path, "--json").stdout)
    assert document["proved"] is False
    assert document["faults"][0] == {
        "rank": 0,
        "position": 1,
        "action": "0SEND_F1",
        "message": "stands before 0F1, which it needs",
    }


def test_all_faults_are_listed_however_many(tmp_path: Path) -> None:
    schedule = build("gpipe", 2, 64)
    schedule.replace(row[:1] for row in schedule.rows).save(tmp_path / "short.json")
    result = run("verify", tmp_path / "short.json")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) > 200
    assert "more" not in result.stdout
    faults = json.loads(run("verify", tmp_path / "short.json", "--json").stdout)["faults"]
    assert len(faults) == len(result.stdout.splitlines()) - 1


def test_the_proof_of_a_sharded_file_without_transfers_says_what_was_proved(sharded: Path) -> None:
    result = run("verify", sharded)
    assert result.exit_code == 0
    assert "8 transfers added here: 4 messages" in result.stdout
    assert "6 sharding actions: each stage is whole when it computes" in result.stdout
    assert "sharding but no transfers: they were added to its computes alone" in result.stdout
    assert json.loads(run("verify", sharded, "--json").stdout)["sharding"] == 6


def test_steps_that_overlap_are_proved_where_they_are_asked_for(sharded: Path) -> None:
    sentence = "  3 steps back to back, no rank waiting for the others in between: no deadlock either\n"
    for source in ("zb-v", sharded):
        assert sentence in run("verify", source, "--steps", 3).stdout
        assert "steps" not in run("verify", source).stdout
    assert json.loads(run("verify", "zb-v", "--steps", 3, "--json").stdout)["steps"] == 3


def test_a_program_is_proved_for_the_links_that_are_asked_for(tmp_path: Path) -> None:
    """Of a file with a certificate for others, the proof is made anew."""
    program = lower(build("gpipe", 2, 4))
    verify(program)
    program.save(tmp_path / "program.json")
    for links, sentence in LINKS.items():
        source = tmp_path / "program.json"
        assert f"nothing buffered and one stream for {sentence}\n" in run("verify", source, "--links", links).stdout
        document = json.loads(run("verify", source, "--links", links, "--json").stdout)
        assert document["certificate"] == asdict(verify(program, links=links)) | {
            "proved": list(verify(program, links=links).proved)
        }
    result = run("verify", "1f1b", "-r", 2, "-m", 4, "--links", "pair")
    assert result.exit_code == 1
    assert "rank 0 at 0SEND_F2 waits in the stream of ranks 0 and 1 for 0RECV_B1 before it" in result.stdout
    assert run("verify", "1f1b", "--links", "edge").exit_code == 2


def test_more_steps_than_memory_holds_are_refused() -> None:
    result = run("verify", "1f1b", "--steps", 1_000_000)
    assert result.exit_code == 2
    assert "1000000 steps of 8 microbatches in 4 stages are 96,000,000 computes" in result.stderr
    assert "give fewer --steps" in result.stderr
