"""The programs of the primer: each runs on any number of ranks, and notices when its result is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import primer_driver
import pytest
from test_docs import find_blocks

from penstock.cli.lanes import Lanes, read_event

ROOT = Path(__file__).resolve().parent.parent
PRIMER = ROOT / "examples" / "primer"
PROGRAMS = {path.stem.partition("_")[2]: path for path in sorted(PRIMER.glob("[0-9]*.py"))}
TRAINING = ["data_parallel", "tensor_columns", "tensor_pairs", "pipeline", "pipeline_overlap", "penstock"]

# What a learner may well get wrong, one slip a program: the text as it stands, and the wrong one.
SLIPS = {
    "send_recv": ("dist.send(mine, dst=right)", "dist.send(theirs, dst=right)"),
    "broadcast": ("dist.broadcast(tensor, src=ROOT)", "None"),
    "scatter": ("scatter(mine, pieces,", "scatter(mine, pieces and pieces[::-1],"),
    "gather": ("dist.gather(mine,", "dist.gather(mine + 1,"),
    "reduce": ("ReduceOp.SUM", "ReduceOp.MAX"),
    "all_gather": ("all_gather_single(everything, mine)", "all_gather_single(everything, mine.flip(0))"),
    "all_reduce": ("ReduceOp.AVG", "ReduceOp.SUM"),
    "reduce_scatter": ("(piece, mine)", "(piece, mine.flip(0))"),
    "all_to_all": ("(theirs, mine,", "(theirs, mine.flip(0),"),
    "barrier": ("dist.barrier()", "None"),
    "two_halves": ("all_gather_single(in_halves, piece)", "all_gather_single(in_halves, mine[rank:][:1])"),
    "ring": ("pieces[into] + exchange", "exchange"),
    "data_parallel": ("/ y.numel()", "/ targets.numel() / ranks"),  # a mean of means, on pieces of 3 3 2 2 rows
    "tensor_columns": ("dist.all_reduce(total)", "None"),  # runs all the same
    "tensor_pairs": ('return summed("B: its part of the gradient of a pair\'s input", gradient)', "return gradient"),
    "pipeline": ("dst=rank - 1)", "dst=rank - 1) or part.grad.zero_() if number else dist.send(part, dst=rank - 1)"),
    "pipeline_overlap": ('reduction="sum") / y.numel()', 'reduction="mean") / 4'),
    "penstock": ("optimizer.zero_grad()", "pass"),
}
MORE_SLIPS = {
    "data_parallel": ("optimizer.zero_grad()", "pass"),
    "tensor_columns": ("[dist.get_rank()]", "[0]"),
    "pipeline": ("outputs.append(output)", "outputs.append(output * 2)"),
    "pipeline_overlap": ("optimizer.zero_grad()", "pass"),
}


class Ran(NamedTuple):
    lines: list[str]
    exit: str  # "" or what it ended with


def run_all(jobs: list[tuple[Path, int]]) -> list[Ran]:
    done = subprocess.run(
        [sys.executable, "-W", "error", primer_driver.__file__],
        input=json.dumps([(str(path), ranks) for path, ranks in jobs]),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, lines = [], []
    for line in done.stdout.splitlines():
        if line.startswith(f"{primer_driver.MARK} begin"):
            lines = []
        elif line.startswith(f"{primer_driver.MARK} end "):
            found.append(Ran(lines, json.loads(line.removeprefix(f"{primer_driver.MARK} end "))))
        else:
            lines.append(line)
    assert len(found) == len(jobs)
    return found


def spoiled(slips: dict[str, tuple[str, str]], folder: Path) -> dict[str, Path]:
    """Copies of the programs, each with its slip."""
    shutil.copytree(PRIMER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    paths = {}
    for name, (right, wrong) in slips.items():
        path = folder / PROGRAMS[name].name
        text = path.read_text()
        assert right in text, (name, right)
        path.write_text(text.replace(right, wrong))
        paths[name] = path
    return paths


class Found(NamedTuple):
    right: dict[str, Ran]
    wrong: dict[str, Ran]
    again: Ran  # pipeline_overlap once more


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    wrong = spoiled(SLIPS, tmp_path_factory.mktemp("wrong") / "primer")
    paths = [*PROGRAMS.values(), *wrong.values(), PROGRAMS["pipeline_overlap"]]
    ran = run_all([(path, 4) for path in paths])
    count = len(PROGRAMS)
    right = dict(zip(PROGRAMS, ran[:count], strict=True))
    return Found(right, dict(zip(wrong, ran[count:-1], strict=True)), ran[-1])


def noticed(ran: Ran) -> bool:
    return "AssertionError" in ran.exit and not any(line.startswith("check: ") for line in ran.lines)


def test_there_is_a_slip_for_every_program() -> None:
    assert list(SLIPS) == list(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_says_who_sends_what_to_whom(name: str, found: Found) -> None:
    ran = found.right[name]
    assert ran.exit == ""
    assert ran.lines[-1].startswith("check: ")
    events = [read_event(line) for line in ran.lines]
    assert {event.source for event in events if event.source is not None} == set(range(4))
    if name != "barrier":
        assert any(event.targets for event in events)
    assert all(event.source not in event.targets for event in events)


@pytest.mark.parametrize("name", SLIPS)
def test_a_wrong_result_is_noticed(name: str, found: Found) -> None:
    assert noticed(found.wrong[name]), found.wrong[name]


def test_all_ways_to_train_print_the_same_losses(found: Found) -> None:
    printed = {name: [line for line in found.right[name].lines if line.startswith("step ")] for name in TRAINING}
    assert len(printed["penstock"]) == 3
    assert all(lines == printed["penstock"] for lines in printed.values()), printed


def test_the_output_does_not_depend_on_who_was_first(found: Found) -> None:
    assert found.again == found.right["pipeline_overlap"]


def test_the_drawings_of_the_course_are_what_the_programs_print(found: Found) -> None:
    lanes = Lanes(4)
    drawn = [line.plain.rstrip() for ran in found.right.values() for line in lanes.draw(map(read_event, ran.lines))]
    blocks = [block.text for block in find_blocks((ROOT / "docs/primer.md").read_text()) if block.language == "drawn"]
    assert len(blocks) >= 10
    for block in blocks:
        assert f"\n{block}" in "\n".join(["", *drawn, ""]), block


def test_tensor_parallelism_in_pairs_sends_half_as_often_and_data_wants_no_gradient(found: Found) -> None:
    def count(name: str, way: str) -> int:
        return sum(f"rank 0 -> rank 1, 2, 3: {way}:" in line for line in found.right[name].lines)

    assert (count("tensor_columns", "F"), count("tensor_columns", "B")) == (4, 3)
    assert (count("tensor_pairs", "F"), count("tensor_pairs", "B")) == (2, 1)


@pytest.mark.slow
def test_more_slips_are_noticed(tmp_path: Path) -> None:
    paths = spoiled(MORE_SLIPS, tmp_path / "primer")
    for name, ran in zip(paths, run_all([(path, 4) for path in paths.values()]), strict=True):
        assert noticed(ran), (name, ran)


@pytest.mark.slow
def test_programs_run_on_other_numbers_of_ranks_or_say_why_not() -> None:
    refused = ("tensor_columns", "pipeline", "pipeline_overlap", "penstock")
    jobs = [(path, ranks) for ranks in (1, 3) for path in PROGRAMS.values()]
    jobs += [(PROGRAMS[name], 5) for name in (*refused, "tensor_pairs", "ring")]
    for (path, ranks), ran in zip(jobs, run_all(jobs), strict=True):
        if ranks == 5 and path.stem.partition("_")[2] in refused:
            assert "take " in ran.exit, (path, ran)
        else:
            assert ran.exit == "", (path, ranks, ran)


@pytest.mark.slow
def test_the_wheel_has_the_programs_and_the_command_runs_them(tmp_path: Path) -> None:
    build = f"from hatchling.build import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    command = [sys.executable, "-c", "from penstock.cli import main; main()", "primer"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    listed = subprocess.run(
        [*command, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    paths = [Path(entry["path"]) for entry in json.loads(listed.stdout)]
    assert [path.name for path in paths] == [path.name for path in PROGRAMS.values()]
    assert all(path.is_relative_to(tmp_path / "installed") for path in paths)
    ran = subprocess.run(
        [*command, "penstock"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "check: " in ran.stdout
