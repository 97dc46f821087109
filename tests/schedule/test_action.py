"""Actions and their text form."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import NotationError
from penstock.schedule import Action, Op, parse

numbers = st.integers(0, 10**6)
SHARDING = [op for op in Op if op.is_sharding]
TRANSFERS = [op for op in Op if op.is_transfer]
COMPUTES = [op for op in Op if op.is_compute]


@st.composite
def transfers(draw: st.DrawFn) -> Action:
    stage, op, peer = draw(numbers), draw(st.sampled_from(TRANSFERS)), draw(st.none() | numbers)
    return Action(stage, op, draw(numbers), peer if peer != stage else None)


def of(ops: list[Op]) -> st.SearchStrategy[Action]:
    return st.tuples(numbers, st.sampled_from(ops), numbers).map(lambda fields: Action(*fields))


computes, forwards, backwards = of(COMPUTES), of([Op.F]), of([Op.B, Op.I, Op.W])
sharding = st.tuples(numbers, st.sampled_from(SHARDING)).map(lambda fields: Action(*fields))
pairs = st.builds(Action.overlap, forwards, backwards) | st.builds(Action.overlap, backwards, forwards)
actions = computes | transfers() | sharding | pairs


@given(actions)
def test_text_reads_back_as_the_same_action(action: Action) -> None:
    assert parse(str(action)) == action
    assert Action.parse(str(action)) == action
    assert type(parse(str(action))) is Action


@given(actions, actions)
def test_two_actions_are_equal_exactly_when_their_text_is(one: Action, other: Action) -> None:
    assert (one == other) == (str(one) == str(other))
    assert hash(one) == hash(parse(str(one)))


@given(actions)
def test_copies_and_pickles_are_equal(action: Action) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(action, protocol)) == action
    assert copy.copy(action) == action
    assert copy.deepcopy([action]) == [action]


def test_every_op_has_its_text() -> None:
    shown = [str(Action(3, op, None if op.is_sharding else 1)) for op in Op if not op.is_pair]
    assert shown == [
        *("3F1", "3B1", "3I1", "3W1"),
        *("3SEND_F1", "3RECV_F1", "3SEND_B1", "3RECV_B1"),
        *("3UNSHARD", "3RESHARD", "3REDUCE_GRAD"),
    ]
    assert repr(Action(3, Op.F, 1)) == "<3F1>"


def test_every_op_is_of_exactly_one_kind() -> None:
    for op in Op:
        assert [op.is_compute, op.is_transfer, op.is_sharding, op.is_pair].count(True) == 1
    assert [op for op in Op if op.is_backward] == [Op.B, Op.I, Op.W]


def test_pairs_are_written_in_the_order_of_their_parts() -> None:
    forward, backward = parse("1F3"), parse("0B2")
    assert str(Action.overlap(forward, backward)) == "(1F3;0B2)OVERLAP_F_B"
    assert str(Action.overlap(backward, forward)) == "(0B2;1F3)OVERLAP_B_F"
    assert Action.overlap(backward, forward).parts() == (backward, forward)
    assert forward.parts() == (forward,)


def test_pairs_with_other_parts_differ_in_hash_too() -> None:
    pairs = {parse(f"(1F{m};0B{n})OVERLAP_F_B") for m in range(10) for n in range(10)}
    assert len(pairs) == 100
    assert len(set(map(hash, pairs))) == 100


@pytest.mark.parametrize(
    ("text", "far"),
    [("1SEND_F0", 2), ("1RECV_F0", 0), ("1SEND_B0", 0), ("1RECV_B0", 2), ("1SEND_F0->3", 3), ("4RECV_F0<-1", 1)],
)
def test_a_transfer_knows_its_other_end(text: str, far: int) -> None:
    assert parse(text).other_end == far


def test_naming_the_neighbouring_stage_is_the_usual_transfer() -> None:
    assert parse("0SEND_F1->1") == parse("0SEND_F1")
    assert str(parse("1RECV_F1<-0")) == "1RECV_F1"


BAD = [
    *("", " ", "F", "2", "2F", "F0", "2,0", "2F0garbage", "garbage2F0", "2F-1", "-2F1", "2f0", "2X0", "2F0 ", " 2F0"),
    *(
        "2F0\n",
        "2F 0",
        "2F0.5",
        "2.0F0",
        "\uff12F0",
        "2F0;",
        "2FF0",
        "2SEND0",
        "2SEND_F",
        "2SEND_X0",
        "2F0->3",
        "2W0<-1",
    ),
    *("2SEND_F0<-3", "2RECV_F0->1", "2SEND_F0->2", "2SEND_F0->", "2SEND_F0->-1", "2UNSHARD0", "2RESHARD->1", "UNSHARD"),
    *("OVERLAP_F_B", "(1F3;0B2)", "(1F3;0B2)OVERLAP", "(1F3)OVERLAP_F_B", "(1F3;0B2;2F0)OVERLAP_F_B", "2OVERLAP_F_B0"),
    *("(1F3;0B2)OVERLAP_B_F", "(0B2;1F3)OVERLAP_F_B", "(1F3;0F2)OVERLAP_F_B", "(1B3;0B2)OVERLAP_F_B"),
    *(
        "(1F3,0B2)OVERLAP_F_B",
        "(1F3;0B)OVERLAP_F_B",
        "(1F3;0UNSHARD)OVERLAP_F_B",
        "((1F3;0B2)OVERLAP_F_B;0B3)OVERLAP_F_B",
    ),
    *("None", "0xF0", "1e3F0", f"{'9' * 5000}F0", f"0F{'9' * 5000}"),
]


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:30]))
def test_what_is_not_an_action_is_refused_with_row_column_and_text(text: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse(text, row=3, column=7)
    message = str(caught.value)
    assert message.startswith("row 3, column 7: ")
    assert repr(text)[:15] in message
    assert "is not an action: " in message


@pytest.mark.parametrize("text", ["2F0garbage", "2F-1", "2,0", "", "2"])
def test_the_refusal_shows_the_expected_form(text: str) -> None:
    with pytest.raises(NotationError, match=r"expected <stage><op><microbatch>, such as 2F0"):
        parse(text)


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{0,2}[A-Z_]{0,7}[0-9]{0,2}[-<>]{0,2}[0-9]?"))
def test_any_text_is_either_an_action_that_prints_alike_or_refused(text: str) -> None:
    try:
        action = parse(text)
    except NotationError:
        return
    assert parse(str(action)) == action
    assert action.stage >= 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Action(-1, Op.F, 0), "0 or more"),
        (lambda: Action(0, Op.F, -1), "0 or more"),
        (lambda: Action(0, Op.F), "needs a microbatch"),
        (lambda: Action(0, Op.UNSHARD, 1), "takes no microbatch"),
        (lambda: Action(0, Op.F, 1, peer=3), "not a transfer"),
        (lambda: Action(2, Op.SEND_F, 1, peer=2), "another stage"),
        (lambda: Action(0, Op.OVERLAP_F_B, 1), "Action.overlap"),
        (lambda: Action.overlap(parse("0F0"), parse("1F0")), "one F and one of B, I, W"),
    ],
)
def test_actions_that_make_no_sense_cannot_be_made(make: object, why: str) -> None:
    assert callable(make)
    with pytest.raises(NotationError, match=why):
        make()
