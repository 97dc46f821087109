"""Plain values: what is read is what was written, and nothing else can be made by reading."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.errors import PeerFailure, UsageError
from penstock.runtime.batch.fingerprint import Detail
from penstock.runtime.engine.recorder import WallStart
from penstock.runtime.engine.report import ReplicaReport, StepReport
from penstock.runtime.messages import plain
from penstock.runtime.messages.plain import NotPlainError, decode, encode, same
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
    WallStart(0, 1.5),
    [0.5, math.inf],
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


def through_json(value: Any) -> Any:
    aside: dict[str, Tensor] = {}

    def store_tensor(tensor: Tensor) -> str:
        aside[str(len(aside))] = tensor.clone()
        return str(len(aside) - 1)

    document = json.loads(json.dumps(encode(value, store_tensor, "it"), allow_nan=False))
    return decode(document, aside.__getitem__)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()


keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())


values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "plain"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=50)
@given(values)
def test_what_was_saved_is_what_comes_back(value: Any) -> None:
    found = through_json(value)
    assert found == value
    assert repr(found) == repr(value)  # 1 and 1.0 and True are told apart


def test_kinds_that_json_lacks() -> None:
    value = {
        "milestones": Counter({3: 1, 7: 2}),
        "order": OrderedDict(b=1, a=2),
        "set": {1, 2},
        "infinite": [math.inf, -math.inf],
        "complex": 1 + 2j,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "numpy": numpy.float32(0.5),
        "deep": [{"x": (torch.arange(3), torch.tensor(2.0))}],
    }
    found = through_json(value)
    assert isinstance(found["milestones"], Counter)
    assert found["deep"][0]["x"][0].tolist() == [0, 1, 2]
    assert {key: found[key] for key in found if key != "deep"} == {key: value[key] for key in value if key != "deep"}
    assert math.isnan(through_json(math.nan))
    assert numpy.array_equal(through_json(numpy.arange(4, dtype="uint32")), numpy.arange(4, dtype="uint32"))
    assert same(found["deep"], value["deep"])
    assert not same([torch.tensor(1.0)], [torch.tensor(1.0, dtype=torch.float64)])


@pytest.mark.parametrize("value", [lambda: 0, nn.Linear(1, 1), type, Exception("x"), numpy.array([object()])])
def test_what_only_a_pickle_could_hold_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"it\['deep'\]\[0\] is a "):
        through_json({"deep": [value]})


def test_a_kind_that_this_version_does_not_know_is_refused() -> None:
    with pytest.raises(NotPlainError, match=r"\$later"):
        decode([{"$later": 1}], {}.__getitem__)
    with pytest.raises(NotPlainError, match="save"):
        decode({"$dtype": "save"}, {}.__getitem__)
    with pytest.raises(NotPlainError, match="the device 'toaster'"):
        decode({"$device": "toaster"}, {}.__getitem__)


def test_the_states_of_torchs_schedulers_and_scaler_go_through() -> None:
    def made() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    lr = torch.optim.lr_scheduler
    for make in (
        lambda it: lr.MultiStepLR(it, [2, 4]),
        lambda it: lr.OneCycleLR(it, 1.0, total_steps=10, cycle_momentum=False),
        lambda it: lr.SequentialLR(it, [lr.ConstantLR(it), lr.ExponentialLR(it, 0.9)], [3]),
        lambda it: lr.ReduceLROnPlateau(it),
        lambda it: lr.LambdaLR(it, lambda epoch: 0.9**epoch),
        lambda it: lr.CosineAnnealingWarmRestarts(it, 3),
    ):
        one, other = make(made()), make(made())
        for _ in range(3):
            one.optimizer.step()
            one.step(*((1.0,) if isinstance(one, lr.ReduceLROnPlateau) else ()))
        other.load_state_dict(through_json(one.state_dict()))
        assert repr(other.state_dict()) == repr(one.state_dict())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    assert through_json(scaler.state_dict()) == scaler.state_dict()


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
