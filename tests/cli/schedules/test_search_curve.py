"""`penstock search --curve`: idle time against memory."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import app

CURVE = ("--curve", "-r", 3, "-m", 6, "--hop", 0.1, "--effort", 60)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["search", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_curve_is_drawn_listed_and_written_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "curve.html"
    result = run(*CURVE, "--memory", "1,2,3", "--html", page)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "3 ranks, 6 microbatches: idle time against memory"
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    text = page.read_text(encoding="utf-8")
    assert text.count("<circle") == 3
    assert "src=" not in text
    document = json.loads(run(*CURVE, "--memory", "1,2,3", "--json").stdout)
    idle = [point["idle_share"] for point in document["points"]]
    assert idle == sorted(idle, reverse=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*CURVE, "--save", "x.csv"), "--save is for one schedule"),
        ((*CURVE, "--memory", 0.01), "one microbatch alone holds 1 there; give caps from there on"),
        (("-r", 2, "-m", 2, "--seconds", 0, "--html", "x.html"), "give --curve as well"),
    ],
)
def test_what_a_curve_cannot_do_is_refused(options: tuple[object, ...], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
