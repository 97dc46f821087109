"""What a rank makes of its program before the first step."""

from __future__ import annotations

from penstock.runtime.engine.prepared_program import prepare
from penstock.schedule import Op, Schedule, build, lower


def texts(program: Schedule, *handlers: Op) -> list[str]:
    return [str(action) for action in prepare(program, 1, handlers).actions]


def test_pairs_are_opened_unless_a_handler_overlaps_them_and_what_the_first_half_made_is_sent_at_once() -> None:
    program = lower(build("dualpipe-v", 2, 4))
    pair = next(action for action in program.rank(1) if action is not None and action.op.is_pair)
    first, second = map(str, pair.parts())
    opened = texts(program)
    assert str(pair) in texts(program, pair.op)
    assert str(pair) not in opened
    between = opened[opened.index(first) + 1 : opened.index(second)]
    assert all("SEND" in action for action in between)


def test_it_is_known_which_backwards_are_split_and_which_computes_are_left_to_handlers() -> None:
    prepared = prepare(lower(build("zb-h1", 2, 3)), 1, [Op.W])
    assert prepared.split_backward == {(1, 0), (1, 1), (1, 2)}
    assert [str(action) for action in prepared.for_handlers] == ["1W0", "1W1", "1W2"]
    assert prepare(lower(build("1f1b", 2, 3)), 1, ()).split_backward == frozenset()
