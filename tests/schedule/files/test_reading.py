"""Files of schedules and recorded runs that somebody has written on purpose, or that something has damaged.

Each is read as what it says, or refused with a ScheduleError (or a UsageError) within seconds: never another error, a
wait, or memory without bound.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from tiers import mostly_exhaustive, tiers

from penstock.errors import NotationError, ScheduleError, UsageError
from penstock.schedule import Costs, Schedule, Timeline, build, lower, simulate, verify

WORDS = [
    "", ",", "\n", "\r", '"', "0F0", "-1F0", "0F-1", "0F99999999999999999999", "99999999F0", "0F" + "9" * 5000, "²F0",
    "(0F0;0B0)OVERLAP_F_B", "((0F0;0B0)OVERLAP_F_B;0B0)OVERLAP_F_B", "0SEND_F1", "3UNSHARD", "\x00", "\ufeff",
    "\x1b[2J",
    "null", "true", "-1", "1e999", "NaN", "Infinity", "[", "]", "{", "}", "[" * 3000, '{"a":' * 3000, "2000000000",
    "[[0,0]]",
]  # fmt: skip


def corpus(folder: Path) -> list[Path]:
    """Files of every kind, as they are written."""
    schedules = [build("1f1b", 3, 4), lower(build("zb-v", 2, 3)), build("dualpipe-v", 2, 3), build("gpipe", 1, 1)]
    paths = [folder / f"{number}.{kind}" for number in range(len(schedules)) for kind in ("csv", "json")]
    for path in paths:
        schedules[int(path.stem)].save(path)
    simulate(schedules[0], Costs()).save(folder / "run.json")
    return [*paths, folder / "run.json"]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Some bytes lost, doubled, moved, flipped, or replaced by a word that means something elsewhere."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        begin, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
        end = chance.choice((end, min(end, begin + 5)))
        piece, word = content[begin:end], chance.choice(WORDS).encode()
        middle = chance.choice((b"", piece * 2, piece[::-1], chance.randbytes(len(piece)), word))
        content = content[:begin] + middle + content[end:]
    return content


def judged(path: Path) -> bool:
    """Whether it is refused."""
    try:
        if path.stem == "run":
            Timeline.load(path)
        else:
            verify(Schedule.load(path, check=False))
    except (ScheduleError, UsageError):
        return True
    return False


@pytest.mark.parametrize("count", tiers(100, 2000))
def test_any_change_is_read_or_refused(count: int, tmp_path: Path) -> None:
    chance = random.Random(7)
    whole = {path: path.read_bytes() for path in corpus(tmp_path)}
    assert not any(map(judged, whole))
    refused = 0
    for _ in range(count):
        path = chance.choice(list(whole))
        path.write_bytes(mutated(whole[path], chance))
        begin = time.process_time()
        refused += judged(path)
        assert time.process_time() - begin < 5, path.read_bytes()[:1000]
        path.write_bytes(whole[path])
    assert refused > count // 2


@pytest.mark.parametrize("name", ["x.csv", "x.json", "run.json"])
def test_what_is_no_plain_file_is_refused_without_a_wait(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    load = Timeline.load if name == "run.json" else Schedule.load
    os.mkfifo(path)
    with pytest.raises(NotationError, match="is not a plain file"):
        load(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(NotationError, match="is not a plain file"):
        load(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(NotationError, match="is not a plain file"):
        load(path)


@pytest.mark.parametrize("cells", mostly_exhaustive([2_000_000, 10_000_000], 2_000_000))
def test_millions_of_cells_are_refused_at_once(cells: int, tmp_path: Path) -> None:
    texts = {
        "wide.csv": "0F0," * cells,
        "long.csv": "0F0\n" * cells,
        "blank.csv": "," * cells,
        "x.json": '{"penstock_schedule": 1, "rows": [[' + '"0F0",' * cells + '"0F0"]]}',
    }
    begin = time.process_time()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ScheduleError, match=rf"has about {f'{cells:,}'[:-1]}\d cells; at most 1,000,000 are read"):
            Schedule.load(tmp_path / name)
    (tmp_path / "x.csv").write_text("".join(f"{stage}F0\n" for stage in range(30_000)))
    with pytest.raises(ScheduleError, match="30,000 stages; at most 20,000"):
        Schedule.load(tmp_path / "x.csv")
    assert time.process_time() - begin < 30


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("[" * 1_000_000, '{"a":' * 1_000_000, json.dumps({"penstock_schedule": 1})[:-1]):
        path.write_text(text)
        with pytest.raises(NotationError, match="not JSON"):
            Schedule.load(path)


@pytest.mark.parametrize(
    "facts",
    ['"microbatches": ' + "9" * 5000, '"placement": [0, 1' + "0" * 30 + "]", '"placement": [0, 4000000000]'],
    ids=lambda text: text[:30],
)
def test_numbers_that_nobody_could_count_to_are_refused_at_once(facts: str, tmp_path: Path) -> None:
    """A rank of 10**30 once made a list of as many ranks; a number of 5000 digits was a bare ValueError."""
    path = tmp_path / "x.json"
    build("1f1b", 2, 3).save(path)
    path.write_text(path.read_text().rstrip().removesuffix("}") + f", {facts}}}")  # the last of equal keys counts
    begin = time.process_time()
    with pytest.raises(NotationError):
        Schedule.load(path)
    assert time.process_time() - begin < 5
