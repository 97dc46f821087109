"""Plain values: what is read is what was written, and nothing else can be made by reading."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from penstock.errors import PeerFailure, UsageError
from penstock.messages import plain
from penstock.runtime.batch.fingerprint import Detail
from penstock.runtime.engine.recorder import Begun
from penstock.runtime.engine.replication import ReplicaReport
from penstock.runtime.engine.report import StepReport
from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.failure.blame import Waiting
from penstock.schedule import Span
from penstock.schedule.action import parse

VALUES: list[Any] = [
    None,
    (1, 1.0, True, "x", b"\x00", [2, {3: (4,)}], {"a", "b"}, frozenset({1}), 2j, float("inf")),
    {frozenset({"dp"}): 1.5, ("loss", "w"): torch.float16},
    parse("(1F3;0B2)OVERLAP_F_B"),
    Span(1, parse("2F0"), 0.5, 1.0, 0.0),
    Waiting(1, Channel(0, 1, "F", 0, 1), 3, 2.5),
    Detail("", "float32 (4,)", 7, (1.0, 2.0)),
    Begun(0, 1.5),
    StepReport({"cost": 1.0}, 0.5, [0.25, 0.75], torch.float64, fingerprint=(True, {0: 17, ("loss", "w"): 3})),
    ReplicaReport(loss=1.0, count=2, more=((1, 2), None)),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    again = plain.loads(plain.dumps(value))
    assert type(again) is type(value)
    assert again == value


def test_a_failure_comes_back_and_is_never_too_long_to_be_told() -> None:
    failure = PeerFailure(2, "x" * 20_000_000, stage=1, action="1F0", microbatch=0, original_traceback="y" * 10**6)
    again = plain.loads(content := plain.dumps(failure))
    assert len(content) < 40_000
    assert (again.rank, again.stage, again.action, again.microbatch) == (2, 1, "1F0", 0)
    assert "characters left out" in again.cause


def test_what_is_not_plain_is_refused_by_its_place() -> None:
    with pytest.raises(UsageError, match=r"the value\['a'\]\[1\] is a builtins.object"):
        plain.dumps({"a": [1, object()]})
    with pytest.raises(UsageError, match="is a tensor"):
        plain.dumps(torch.ones(2))


@pytest.mark.parametrize(
    "content",
    [b'{"$Span":{"rank":"0"}}', b'{"$Span":{"other":1}}', b'{"$os":{}}', b'{"$dtype":"load"}', b"[", b'{"$set":[[1]]}'],
)
def test_what_no_rank_writes_is_refused(content: bytes) -> None:
    with pytest.raises(plain.NotPlainError):
        plain.loads(content)


def test_mutated_messages_are_read_or_refused() -> None:
    chance = random.Random(3)
    for device in ("bogus", "cuda:99999999999"):
        with pytest.raises(plain.NotPlainError, match="torch does not have"):
            plain.loads(json.dumps({"$device": device}).encode())
    good = plain.dumps((3, {"a": (1, 2.5, None, "x" * 40)}, [torch.float32, b"bytes", {1, 2}, float("nan")]))
    for _ in range(2000):
        content = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        try:
            plain.loads(bytes(content[: chance.randint(1, len(content))]))
        except plain.NotPlainError:
            continue
