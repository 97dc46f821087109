"""One thing that a rank does, and its text form `<stage><op><microbatch>`.

The notation is the one that torch's pipelining prints (`2F0`, `1I3`, `0SEND_F1`,
`3UNSHARD`, `(1F3;0B2)OVERLAP_F_B`), so that logs, files, traces, tests and errors all
speak it and people can carry schedules between the two libraries. One addition: a transfer
that does not go to the neighbouring stage names its other end, `0SEND_F1->3` and
`3RECV_F1<-0`, because skip connections are ordinary here.

An `Action` is a tuple underneath: schedules hold millions of them, and a tuple is the
cheapest frozen, hashable value that Python has. The parser is anchored and complete: what
it does not understand is an error, never a shorter action.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, Self, cast

from penstock.errors import Fault, NotationError


class Op(IntEnum):
    """The kind of an action.

    - `F`: forward.
    - `B`: full backward, the same as `I` then `W`.
    - `I`: backward for the inputs.
    - `W`: backward for the weights.
    - `SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`: transfers of outputs (`F`) and of gradients (`B`).
    - `UNSHARD`, `RESHARD`, `REDUCE_GRAD`: gather and release the parameters of a stage, and reduce its gradients.
    - `OVERLAP_F_B`, `OVERLAP_B_F`: a pair of a forward and a backward that may run at the same time.
    """

    F = 0  # forward
    B = 1  # full backward: I then W
    I = 2  # backward for the inputs
    W = 3  # backward for the weights
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    UNSHARD = 8
    RESHARD = 9
    REDUCE_GRAD = 10
    OVERLAP_F_B = 11  # a pair, the forward named first
    OVERLAP_B_F = 12  # a pair, the backward named first

    def __str__(self) -> str:
        return self.name

    @property
    def is_compute(self) -> bool:
        """Whether it is F, B, I or W: what takes time on the device."""
        return self <= Op.W

    @property
    def is_backward(self) -> bool:
        """Whether it is B, I or W."""
        return Op.B <= self <= Op.W

    @property
    def is_transfer(self) -> bool:
        """Whether it is a send or a receive."""
        return Op.SEND_F <= self <= Op.RECV_B

    @property
    def is_sharding(self) -> bool:
        """Whether it is UNSHARD, RESHARD or REDUCE_GRAD, which concern a whole stage and no microbatch."""
        return Op.UNSHARD <= self <= Op.REDUCE_GRAD

    @property
    def is_pair(self) -> bool:
        """Whether it is two computes that may run at the same time."""
        return self >= Op.OVERLAP_F_B


# how far away the other end of a transfer is when the text does not say: one stage on or back
NEIGHBOUR = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}
ARROW = {Op.SEND_F: "->", Op.RECV_F: "<-", Op.SEND_B: "->", Op.RECV_B: "<-"}
EXPECTED = "expected <stage><op><microbatch>, such as 2F0, 1I3, 0SEND_F1, 0SEND_F1->3, 3UNSHARD or (1F3;0B2)OVERLAP_F_B"

LARGEST = 2**31 - 1  # what an element of `Columns` holds: far above any stage and microbatch
LONGEST = 200  # characters; far above any real action, far below what Python refuses to read as a number

_PLAIN = re.compile(
    r"(?P<stage>[0-9]+)"
    r"(?P<op>SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)"
    r"(?P<microbatch>[0-9]+)?"
    r"(?:(?P<arrow>->|<-)(?P<peer>[0-9]+))?"
)
_PAIR = re.compile(r"\((?P<first>[^;()]*);(?P<second>[^;()]*)\)(?P<op>OVERLAP_F_B|OVERLAP_B_F)")


# A whole number; None only for actions about a whole stage. Typed loosely so that the passes, which
# meet computes and transfers alone, can count with it.
Microbatch = Any


class _Fields(NamedTuple):
    stage: int
    op: Op
    microbatch: Microbatch
    peer: int | None
    pair: tuple[Action, Action] | None


class Action(_Fields):
    """One thing that a rank does: `Action(2, Op.F, 0)` is `2F0`, the forward of stage 2 for microbatch 0.

    For an overlapped pair, `stage` and `microbatch` are those of its first part; iterate `parts()` to see the computes
    of any action, paired or not.

    Args:
        stage: The stage.
        op: The op, or its name, such as `"F"`.
        microbatch: The microbatch; `None` for ops that concern a whole stage.
        peer: The other stage of a transfer that skips stages.
    """

    __slots__ = ()

    def __new__(cls, stage: int, op: Op | str, microbatch: int | None = None, peer: int | None = None) -> Self:
        op = _op_of(op)
        if op.is_pair:
            raise NotationError(f"{op} joins two actions: write Action.overlap(first, second)")
        if type(stage) is not int:
            _whole("stage", stage)
        if microbatch is not None and type(microbatch) is not int:
            _whole("microbatch", microbatch)
        if peer is not None and type(peer) is not int:
            _whole("peer", peer)
        if stage < 0 or (microbatch is not None and microbatch < 0):
            raise NotationError(f"stage {stage}, microbatch {microbatch}: both must be 0 or more")
        if max(stage, microbatch or 0, peer or 0) > LARGEST:
            raise NotationError(f"a stage or microbatch has a number of at most {LARGEST:,}")
        if op.is_sharding and microbatch is not None:
            raise NotationError(f"{stage}{op} is about a whole stage and takes no microbatch, got {microbatch}")
        if not op.is_sharding and microbatch is None:
            raise NotationError(f"{stage}{op} needs a microbatch, such as {stage}{op}0")
        if peer is not None:
            if not op.is_transfer:
                raise NotationError(f"{stage}{op}{microbatch} is not a transfer and has no peer, got peer {peer}")
            if peer < 0 or peer == stage:
                raise NotationError(f"{stage}{op}{microbatch}: the other end must be another stage, got {peer}")
            if peer == stage + NEIGHBOUR[op]:
                peer = None
        return tuple.__new__(cls, (stage, op, microbatch, peer, None))

    @classmethod
    def overlap(cls, first: Action, second: Action) -> Self:
        """Make a pair of a forward and a backward that may run at the same time, in this order.

        Args:
            first: The first of the two.
            second: The second.
        """
        for part in (first, second):
            if not isinstance(part, Action):
                raise NotationError(f"an overlapped pair is of two Actions, got {part!r}; parse text with parse()")
        backward_first = first.op.is_backward
        forward, backward = (second, first) if backward_first else (first, second)
        if forward.op is not Op.F or not backward.op.is_backward:
            raise NotationError(f"an overlapped pair is one F and one of B, I, W; got {first} and {second}")
        op = Op.OVERLAP_B_F if backward_first else Op.OVERLAP_F_B
        return tuple.__new__(cls, (first.stage, op, first.microbatch, None, (first, second)))

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read one action from text; `NotationError` if it is anything else.

        Args:
            text: The text, such as `1I3`.
        """
        return parse(text)

    def parts(self) -> tuple[Action, ...]:
        """Return the two halves of an overlapped pair, in order; of any other action, the action itself."""
        return self.pair if self.pair is not None else (self,)

    @property
    def other_end(self) -> int:
        """The stage at the other end of a transfer."""
        return self.peer if self.peer is not None else self.stage + NEIGHBOUR[self.op]

    def __str__(self) -> str:
        if self.pair is not None:
            return f"({self.pair[0]};{self.pair[1]}){self.op.name}"
        microbatch = "" if self.microbatch is None else self.microbatch
        far = "" if self.peer is None else f"{ARROW[self.op]}{self.peer}"
        return f"{self.stage}{self.op.name}{microbatch}{far}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def __getnewargs__(self) -> tuple[object, ...]:  # copy and pickle must not meet __new__'s checks
        return tuple(self)

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (str(self),)


def _op_of(op: object) -> Op:
    if isinstance(op, Op):
        return op
    if isinstance(op, str) and op in Op.__members__:
        return Op[op]
    if isinstance(op, int) and not isinstance(op, bool) and 0 <= op < len(Op):
        return Op(op)
    raise NotationError(f"{op!r} is not an op; ops are {', '.join(Op.__members__)}")


def _whole(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise NotationError(f"{name} must be a whole number of at least 0, got {number!r}")


def _restore(text: str) -> Action:
    return parse(text)


def trusted(stage: int, op: Op, microbatch: int | None = None, peer: int | None = None) -> Action:
    """Make an Action from numbers that are known to be right: builders and passes make millions."""
    return tuple.__new__(Action, (stage, op, microbatch, peer, None))


def in_order(stage: int, op: Op, microbatches: Iterable[int]) -> list[Action]:
    """Make one stage's actions of one op for several microbatches, as `trusted` makes each."""
    fields = zip(repeat(stage), repeat(op), microbatches, repeat(None), repeat(None), strict=False)
    return [*map(cast("Any", tuple.__new__), repeat(Action), fields)]


def parse(text: str, row: int | None = None, column: int | None = None) -> Action:
    """Read one action from text; `NotationError` if it is anything else.

    Args:
        text: The text, such as `1I3`.
        row: The row where it stands in a file, for the message.
        column: The column where it stands in a file, for the message.
    """
    if not isinstance(text, str):
        _refuse(text, row, column, EXPECTED)
    match = _PLAIN.fullmatch(text)
    if match is None:
        return _parse_pair(text, row, column)
    op = Op[match["op"]]
    if match["arrow"] is not None and match["arrow"] != ARROW.get(op):
        wanted = f"{op} is written with {ARROW[op]}" if op in ARROW else f"{op} is no transfer"
        _refuse(text, row, column, wanted)
    if len(text) > LONGEST:
        _refuse(f"{text[:20]}...", row, column, f"it is {len(text)} characters long")
    microbatch = None if match["microbatch"] is None else int(match["microbatch"])
    peer = None if match["peer"] is None else int(match["peer"])
    try:
        return Action(int(match["stage"]), op, microbatch, peer)
    except NotationError as error:
        _refuse(text, row, column, error.faults[0].message)


def _parse_pair(text: str, row: int | None, column: int | None) -> Action:
    match = _PAIR.fullmatch(text)
    if match is None:
        _refuse(text, row, column, EXPECTED)
    try:
        action = Action.overlap(parse(match["first"]), parse(match["second"]))
    except NotationError as error:
        _refuse(text, row, column, error.faults[0].message)
    if action.op.name != match["op"]:
        _refuse(text, row, column, f"the order of its parts makes it {action.op}, not {match['op']}")
    return action


def _refuse(text: object, row: int | None, column: int | None, why: str) -> NoReturn:
    where = "" if row is None else f"row {row}, column {column}: "
    raise NotationError([Fault(f"{where}{text!r} is not an action: {why}")])
