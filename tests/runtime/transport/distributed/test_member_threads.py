"""Gloo's threads do not take the core of a rank that computes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from transport_harness import run, values

from penstock.runtime.transport.channel import Channel
from penstock.runtime.transport.distributed.member import hold_back_loop_threads, loop_threads

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies of threads are Linux's")

BOTH_WAYS = [Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)]


def policies_and_turns(transport: Any) -> tuple[list[int], list[int], int]:
    """The policies of the loop threads before and after channels are open, and how often two sends gave way."""
    before = [os.sched_getscheduler(thread) for thread in loop_threads()]
    if transport.rank == 1:  # somebody's own choice
        os.sched_setscheduler(loop_threads()[0], os.SCHED_IDLE, os.sched_param(0))
    transport.open(BOTH_WAYS)
    after = sorted(os.sched_getscheduler(thread) for thread in loop_threads())
    turns = 0
    yields = transport._transfers.give_way

    def count() -> None:
        nonlocal turns
        turns += yields is os.sched_yield
        yields()

    transport._transfers.give_way = count
    for microbatch in range(2):
        transport.send(transport.rank, microbatch, float(microbatch))
    for microbatch in range(2):
        assert transport.receive(1 - transport.rank, microbatch) == microbatch
    transport.flush()
    transport.exchange(None)
    return before, after, turns


def test_over_gloo_its_threads_are_held_back_unless_somebody_chose_and_every_send_gives_way() -> None:
    (before, after, turns), (_, chosen, turns_there) = values(run("distributed", policies_and_turns))
    assert before == [os.SCHED_OTHER]
    assert after == [os.SCHED_BATCH] * 2  # of the group's connection and of the second one
    assert chosen == sorted([os.SCHED_BATCH, os.SCHED_IDLE])
    assert turns == turns_there == 4  # before and after each send


def test_on_one_host_gloo_carries_no_values_and_its_threads_are_left_as_they_are() -> None:
    for before, after, turns in values(run("shared", policies_and_turns_of_shared)):
        assert before == after == [os.SCHED_OTHER]
        assert turns is None


def policies_and_turns_of_shared(transport: Any) -> tuple[list[int], list[int], Any]:
    before = [os.sched_getscheduler(thread) for thread in loop_threads()]
    transport.open(BOTH_WAYS)
    after = [os.sched_getscheduler(thread) for thread in loop_threads()]
    return before, after, transport._transfers.give_way()


def test_without_gloo_there_is_nobody_to_hold_back() -> None:
    assert not loop_threads()
    assert hold_back_loop_threads() is None
