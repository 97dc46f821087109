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
from warm import warm_commands

from penstock.cli.primer import Lanes, read_event

ROOT = Path(__file__).resolve().parent.parent
PRIMER = ROOT / "examples" / "primer"
PROGRAMS = {path.stem.partition("_")[2]: path for path in sorted(PRIMER.glob("[0-9]*.py"))}
TRAINING = [name for name, path in PROGRAMS.items() if "forward_and_backward" in path.read_text()]
TRAINING += ["data_parallel", "penstock"]

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
    "data_overlap": ("weight.register_post_accumulate_grad_hook(leave)", "None"),  # runs all the same
    "sharded": ("dist.reduce_scatter_single(piece.grad, gradients)", "piece.grad.copy_(gradients.chunk(ranks)[rank])"),
    "tensor_columns": ("dist.all_reduce(for_input)", "None"),
    "tensor_rows": ("dist.all_reduce(output)", "None"),
    "tensor_pairs": ('if context.way == "B" else', "if False else"),  # the first loss is right
    "pipeline": ("dist.send(part.grad,", "dist.send(part.detach(),"),
    "pipeline_overlap": ("output.detach(), rank + 1)", "part.detach(), rank + 1)"),
    "pipeline_1f1b": ("return sorted(forward + backward)", "return forward + backward"),  # equal results, more kept
    "penstock": ("optimizer.zero_grad()", "pass"),
}
MORE_SLIPS = {
    "data_parallel": ("optimizer.zero_grad()", "pass"),
    "data_overlap": ("dist.all_reduce(weight.grad,", "dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG,"),
    "sharded": ("dist.all_gather_single(whole, piece.detach())", "whole.copy_(flat)"),
    "tensor_columns": ("own = gradient.chunk(ranks, dim=1)[rank]", "own = gradient.chunk(ranks, dim=1)[0]"),
    "tensor_rows": ("for_part = gradient @", "for_part = gradient / ranks @"),
    "tensor_pairs": ('F.gelu(Sum.apply(F.linear(part, rows), "F"))', 'Sum.apply(F.gelu(F.linear(part, rows)), "F")'),
    "pipeline": ("kept.append((part, output))", "kept.append((part, output * 2))"),
    "pipeline_overlap": ("inputs[number].grad,", "inputs[0].grad[: len(inputs[number])].clone(),"),
    "pipeline_1f1b": ("output.backward(receive(output, rank + 1)", "output.backward(2 * receive(output, rank + 1)"),
}


# What happens to a rank, and what is said then of whom. Rank 2's neighbours notice too, and must not be blamed.
FATES = {
    "it fails": ("1 / 0", "rank 2 failed:\n"),
    "it is killed": ("os.kill(os.getpid(), 9)", "rank 2 was killed by signal 9\n"),
    "it leaves without a word": ("os._exit(3)", "rank 2 left with exit code 3 before its end\n"),
    "it leaves as if all were well": ("os._exit(0)", "rank 2 left with exit code 0 before its end\n"),
    "its error is very long": ("raise ValueError('x' * 10**6)", "rank 2 failed:\n"),
}
STOPS = {"SIGINT": "130", "SIGTERM": "143"}  # what a program ends with when its first process is told to stop


class Ran(NamedTuple):
    lines: list[str]
    exit: str  # "" or what it ended with


def run_all(jobs: list[tuple[Path, int]]) -> list[Ran]:
    done = subprocess.run(
        [warm_commands() / "python", "-W", "error", primer_driver.__file__],
        input=json.dumps([(str(path), ranks) for path, ranks in jobs]),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
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


def fated(folder: Path) -> dict[str, Path]:
    """Copies of the barrier, in which something happens to rank 2; beside those that share its folder."""
    paths = {}
    text = PROGRAMS["barrier"].read_text().replace("0.05 * rank", "0")
    for number, (name, (fate, _)) in enumerate(FATES.items()):
        paths[name] = folder / f"fate_{number}.py"
        end = f"    if rank == 2:\n        import os\n\n        {fate}\n    dist.barrier()\n"
        paths[name].write_text(text.replace("    dist.barrier()\n", end))
    return paths


def stopped(folder: Path) -> dict[str, Path]:
    """Copies of the barrier, in which the ranks wait for one that tells the process that started them to stop."""
    paths = {name: folder / f"stop_{name}.py" for name in STOPS}
    for name, path in paths.items():
        stop = f"if rank == 2:\n        import os, signal\n\n        os.kill(os.getppid(), signal.{name})\n"
        path.write_text(
            PROGRAMS["barrier"].read_text().replace("time.sleep(0.05 * rank)", f"{stop}        time.sleep(30)")
        )
    return paths


class Found(NamedTuple):
    right: dict[str, Ran]
    again: Ran  # pipeline_1f1b once more
    refused: Ran  # and on too many ranks


class Faulty(NamedTuple):
    wrong: dict[str, Ran]
    fates: dict[str, Ran]
    stops: dict[str, Ran]


@pytest.fixture(scope="module")
def found() -> Found:
    jobs = [(path, 4) for path in PROGRAMS.values()]
    *right, again, refused = run_all([*jobs, (PROGRAMS["pipeline_1f1b"], 4), (PROGRAMS["pipeline_1f1b"], 5)])
    return Found(dict(zip(PROGRAMS, right, strict=True)), again, refused)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    folder = tmp_path_factory.mktemp("wrong") / "primer"
    wrong = spoiled(SLIPS, folder)
    kinds = (wrong, fated(folder), stopped(folder))
    ran = iter(run_all([(path, 4) for paths in kinds for path in paths.values()]))
    return Faulty(*({name: next(ran) for name in names} for names in kinds))


def noticed(ran: Ran) -> bool:
    return "AssertionError" in ran.exit and not any(line.startswith("check: ") for line in ran.lines)


def test_there_is_a_slip_for_every_program() -> None:
    assert list(SLIPS) == list(PROGRAMS)


@pytest.mark.slow
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLIPS)
def test_a_wrong_result_is_noticed(name: str, faulty: Faulty) -> None:
    assert noticed(faulty.wrong[name]), faulty.wrong[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FATES)
def test_the_rank_that_is_to_blame_is_named_and_where_the_others_were(name: str, faulty: Faulty) -> None:
    ran = faulty.fates[name]
    assert ran.exit.startswith(FATES[name][1])
    assert "rank 2 was then" not in ran.exit
    assert "rank 0 was then at line " in ran.exit
    assert len(ran.exit) < 20_000


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STOPS)
def test_a_program_that_is_told_to_stop_leaves_without_a_word_and_nobody_behind(name: str, faulty: Faulty) -> None:
    """The driver fails if a process is left."""
    assert faulty.stops[name].exit == STOPS[name]
    assert not any(line.startswith("check: ") for line in faulty.stops[name].lines)


@pytest.mark.slow
def test_a_number_of_ranks_that_cannot_work_is_refused_in_a_line(found: Found) -> None:
    assert found.refused == Ran([], "5 ranks cannot run it; take one of 1, 2, 3, 4")


@pytest.mark.slow
def test_all_ways_to_train_print_the_same_losses(found: Found) -> None:
    printed = {name: [line for line in found.right[name].lines if line.startswith("step ")] for name in TRAINING}
    assert len(printed["penstock"]) == 3
    assert all(lines == printed["penstock"] for lines in printed.values()), printed


@pytest.mark.slow
def test_the_output_does_not_depend_on_who_was_first(found: Found) -> None:
    assert found.again == found.right["pipeline_1f1b"]


@pytest.mark.slow
def test_the_drawings_of_the_course_are_what_the_programs_print(found: Found) -> None:
    lanes = Lanes(4)
    drawn = [line.plain.rstrip() for ran in found.right.values() for line in lanes.draw(map(read_event, ran.lines))]
    blocks = [block.text for block in find_blocks((ROOT / "docs/primer.md").read_text()) if block.language == "drawn"]
    assert len(blocks) >= 10
    for block in blocks:
        assert f"\n{block}" in "\n".join(["", *drawn, ""]), block


@pytest.mark.slow
def test_tensor_parallelism_sends_one_sum_a_pair_each_way_and_none_for_the_data(found: Found) -> None:
    def count(name: str, way: str) -> int:
        return sum(f"rank 0 -> rank 1, 2, 3: {way}:" in line for line in found.right[name].lines)

    assert [count("tensor_columns", way) for way in "FB"] == [1, 1]
    assert [count("tensor_rows", way) for way in "FB"] == [1, 0]
    assert [count("tensor_pairs", way) for way in "FB"] == [2, 1]


@pytest.mark.exhaustive
def test_more_slips_are_noticed(tmp_path: Path) -> None:
    paths = spoiled(MORE_SLIPS, tmp_path / "primer")
    for name, ran in zip(paths, run_all([(path, 4) for path in paths.values()]), strict=True):
        assert noticed(ran), (name, ran)


@pytest.mark.exhaustive
def test_programs_run_on_other_numbers_of_ranks_or_say_why_not() -> None:
    refused = ("sharded", "tensor_columns", "pipeline", "pipeline_overlap", "penstock")
    jobs = [(path, ranks) for ranks in (1, 3) for path in PROGRAMS.values()]
    jobs += [(PROGRAMS[name], 5) for name in (*refused, "tensor_rows", "tensor_pairs", "ring")]
    jobs += [(PROGRAMS[name], 12) for name in ("data_parallel", "data_overlap")]  # two ranks without a row
    for (path, ranks), ran in zip(jobs, run_all(jobs), strict=True):
        if ranks == 5 and path.stem.partition("_")[2] in refused:
            assert "take one of " in ran.exit, (path, ran)
        else:
            assert ran.exit == "", (path, ranks, ran)


@pytest.mark.slow
def test_the_wheel_has_the_programs_and_the_benches_and_the_command_runs_them(tmp_path: Path) -> None:
    build = f"from hatchling.build import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")

    def call(*arguments: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-c", "from penstock.cli import main; main()", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    benches = sorted(path for path in (ROOT / "bench").glob("*.py") if "\ndef main(" in path.read_text())
    for kind, files in {"primer": PROGRAMS.values(), "bench": benches}.items():
        paths = [Path(entry["path"]) for entry in json.loads(call(kind, "--json"))]
        assert [path.name for path in paths] == [path.name for path in files]
        assert all(path.is_relative_to(tmp_path / "installed") for path in paths)
    assert "check: " in call("primer", "penstock")
    assert json.loads(call("bench", "overhead", "--quick", "--json", "--schedules", "1f1b"))["tables"][0]["rows"]
