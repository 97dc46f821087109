"""What the benches share: a row is printed and is in the document, and nothing else is on stdout beside that."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PROGRAM = '''"""A bench that is none: one against two.

More about it.
"""
import os
import sys
from report import Column, Goal, add_names, bench

def main():
    def more(parser):
        add_names(parser, "--kinds", ("a", "b"))

    with bench(__doc__, 5, ("1f1b", "zb-v"), ("zb-v",), more) as settings:
        columns = [Column("who", 8), Column("us", 4)]
        columns += [Column("one/two", 21), Column("one/two, busy", 5, "{:.3f}", "busy")]
        os.system("echo a child speaks")
        print("somebody prints")
        for rank in (0, 1):
            table = settings.report.table(rank, f"a table of rank {rank}", columns)
            table.row("one", 12.345, Goal(0.25, 0.5), 0.12345)
            table.row("two", None, Goal(0.75, 0.5), None)
        table = settings.report.table(0, "shares", [Column("share", 8), Column("measured", 21)])
        table.row("of all", Goal(0.9, 0.97, at_least=True))
        if settings.rounds == 1:
            sys.exit(7)

if __name__ == "__main__":
    main()
'''
TABLES = """
a table of rank 0
who         us                one/two   busy
one       12.3   0.25 <= 0.50          0.123
two          -   0.75 <= 0.50 MISSED       -

shares
share                  measured
of all     0.90 >= 0.97 MISSED
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "nothing.py"
    path.write_text(PROGRAM)
    return path


def run(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, str(program), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


def tables_in(text: str) -> str:
    """Without what is of this machine, and of others."""
    lines = [line for line in text.splitlines() if not line.startswith("(load average of this machine at the start: ")]
    assert [lines.pop(lines.index(said)) for said in ("a child speaks", "somebody prints")]
    return "\n".join([*lines, ""])


@pytest.mark.slow
def test_rows_are_printed_and_with_json_they_are_one_document(program: Path) -> None:
    plain = run(program)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert tables_in(plain.stdout) == TABLES

    asked = run(program, "--json", "--quick", "--kinds", "b")
    assert asked.returncode == 0
    assert tables_in(asked.stderr) == TABLES
    document = json.loads(asked.stdout)
    assert document["bench"] == "nothing"
    assert document["title"] == "A bench that is none: one against two."
    assert document["options"] == {"quick": True, "rounds": 2, "schedules": ["zb-v"], "kinds": ["b"]}
    assert document["machine"].keys() == {"cores", "system", "python", "penstock", "torch"}
    assert [(table["title"], table["rows"]) for table in document["tables"]] == [
        (
            "a table of rank 0",
            [
                {"who": "one", "us": 12.345, "one/two": 0.25, "one/two, busy": 0.12345},
                {"who": "two", "us": None, "one/two": 0.75, "one/two, busy": None},
            ],
        ),
        ("shares", [{"share": "of all", "measured": 0.9}]),
    ]
    keys = ("table", "row", "column", "value", "limit", "at_least", "met")
    assert [tuple(goal[key] for key in keys) for goal in document["goals"]] == [
        (0, 0, "one/two", 0.25, 0.5, False, True),
        (0, 1, "one/two", 0.75, 0.5, False, False),
        (1, 0, "measured", 0.9, 0.97, True, False),
    ]


def test_a_bench_that_fails_has_no_document(program: Path) -> None:
    failed = run(program, "--json", "--rounds", "1")
    assert (failed.returncode, failed.stdout) == (7, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--schedules zbv", "--schedules: zbv is none of 1f1b, zb-v"),
        ("--kinds ,", "--kinds: nothing is none of a, b"),
        ("--rounds 0", "--rounds: 0 is no whole number from 1 up"),
    ],
)
def test_a_wrong_option_says_which_would_work(program: Path, options: str, said: str) -> None:
    wrong = run(program, *options.split())
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("usage: penstock bench nothing ")
    assert said in wrong.stderr


def test_two_columns_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    report: ModuleType = __import__("report")
    with pytest.raises(ValueError, match="have one name"):
        report.Report(None).table(0, "twice", [report.Column("busy"), report.Column("busy")])


def test_benches_say_what_they_find_in_tables_alone() -> None:
    """A `print` of a row would be missing in the document; only the processes of one bench speak to it that way."""
    spoken = set()
    for path in BENCH.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) in ("print", "sys.stdout.write"):
                        streams = {ast.unparse(word.value) for word in call.keywords if word.arg == "file"}
                        if "sys.stderr" not in streams:
                            spoken.add(f"{path.stem}.{function.name}")
    assert spoken == {"schedules.work"}
