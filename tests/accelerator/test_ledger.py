"""The ledger finds what is not ordered, and only that: each right use beside the mutant that lacks one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from accelerator.harness import NAMES, attempt, on_device
from tiers import mostly_slow

# A case returns nothing: what counts is what the ledger found while it ran.
RIGHT: list[Callable[[Any, Any], None]] = []
WRONG: dict[Callable[[Any, Any], None], str] = {}  # with a part of the race that is to be found


def right(case: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    RIGHT.append(case)
    return case


def wrong(text: str) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]:
    def add(case: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        WRONG[case] = text
        return case

    return add


@right
def a_stream_that_waits_for_the_one_that_wrote(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    torch.accelerator.current_stream().wait_stream(side)
    y.record_stream(torch.accelerator.current_stream())
    (y + 1).sum()


@wrong("does not follow")
def a_stream_that_reads_without_waiting(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on), torch.Stream(device=on)
    with side:
        torch.add(x, 1)


@right
def an_event_between_two_streams(torch: Any, on: Any) -> None:
    x, side, ready = torch.ones(4, device=on), torch.Stream(device=on), torch.Event(device=on)
    ready.record()
    side.wait_event(ready)
    with side:
        x.add_(1)
    side.synchronize()


@wrong("does not follow")
def an_event_recorded_before_the_producer(torch: Any, on: Any) -> None:
    side, ready = torch.Stream(device=on), torch.Event(device=on)
    ready.record()
    x = torch.ones(4, device=on)
    side.wait_event(ready)
    with side:
        x.add_(1)
    side.synchronize()


@right
def a_host_that_waits_between_two_streams(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on), torch.Stream(device=on)
    torch.accelerator.synchronize(on)
    with side:
        x.add_(1)
    side.synchronize()
    x.add_(1)


@wrong("write by aten::add on")
def a_stream_that_goes_on_while_another_writes(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)
    x.add_(1)


@right
def two_streams_that_write_to_halves_of_a_tensor(torch: Any, on: Any) -> None:
    x, side = torch.zeros(8, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x[:4].add_(1)
    x[4:].add_(1)
    x.record_stream(side)


@wrong("does not follow")
def two_streams_that_write_to_parts_that_overlap(torch: Any, on: Any) -> None:
    x, side = torch.zeros(8, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x[:5].add_(1)
    x[4:].add_(1)
    x.record_stream(side)


@right
def memory_that_is_recorded_before_it_is_freed(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    x.record_stream(side)
    del x
    torch.ones(4, device=on)
    del y


@wrong("no record_stream, no wait")
def memory_that_is_freed_while_another_stream_reads_it(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    del x
    torch.ones(4, device=on)
    del y


@wrong("no record_stream, no wait")
def memory_that_a_third_stream_writes_after_it_was_freed(torch: Any, on: Any) -> None:
    """As a communicator writes what it receives into memory of a stream that does nothing by itself."""
    side, third = torch.Stream(device=on), torch.Stream(device=on)
    with side:
        x = torch.ones(4, device=on)
    torch.accelerator.current_stream().wait_stream(side)
    y = x + 1
    del x
    with side:
        x = torch.empty(4, device=on)
    third.wait_stream(side)
    with third:
        x.fill_(1)
    x.record_stream(third)
    del y


@right
def memory_that_is_freed_before_its_stream_waits_for_the_other(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x + 1
    del x
    torch.accelerator.current_stream().wait_stream(side)
    torch.ones(4, device=on)
    del y


@wrong("fresh memory")
def fresh_memory_that_another_stream_writes_first(torch: Any, on: Any) -> None:
    torch.ones(4, device=on).add_(1)  # freed: what comes next may lie there
    x, side = torch.empty(4, device=on), torch.Stream(device=on)
    with side:
        x.fill_(1)
    torch.accelerator.current_stream().wait_stream(side)


@right
def fresh_memory_that_another_stream_writes_after_waiting(torch: Any, on: Any) -> None:
    torch.ones(4, device=on).add_(1)
    x, side = torch.empty(4, device=on), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.fill_(1)
    torch.accelerator.current_stream().wait_stream(side)


@right
def a_copy_between_devices_in_both_directions(torch: Any, on: Any) -> None:
    other = torch.device(on.type, on.index + 1)
    x = torch.ones(4, device=on) * 2
    y = x.to(other) * 3
    x.add_(1)
    (y.to(on) + x).sum()


@wrong("does not follow")
def a_copy_between_devices_from_a_stream_that_nobody_waited_for(torch: Any, on: Any) -> None:
    other, side = torch.device(on.type, on.index + 1), torch.Stream(device=on)
    with side:
        x = torch.ones(4, device=on)
    x.to(other)


@right
def a_backward_on_the_streams_of_its_forward(torch: Any, on: Any) -> None:
    x, side = torch.ones(4, device=on, requires_grad=True), torch.Stream(device=on)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = (x * 2).sum()
    y.backward()
    (x.grad + 1).sum()


@right
def a_copy_to_pinned_memory_that_is_waited_for(torch: Any, on: Any) -> None:
    x, here = torch.full((4,), 7.0, device=on), torch.empty(4).pin_memory(on.type)
    here.copy_(x, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert here.tolist() == [7.0] * 4, here


def ledger_of(case: str) -> list[str]:
    import torch
    from accelerator import pretend

    on = pretend.device(1)
    torch.accelerator.set_device_index(1)
    pretend.clear()
    globals()[case](torch, on)
    found = [str(each) for each in pretend.races()]
    pretend.clear()
    return found


def ledgers_of(cases: list[str]) -> dict[str, list[str]]:
    return {case: ledger_of(case) for case in cases}


@pytest.fixture(scope="module", params=mostly_slow(NAMES, "pretend"))
def found(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The races of every case, on the device under each name."""
    cases = [case.__name__ for case in (*RIGHT, *WRONG)]
    value: dict[str, list[str]] = on_device(ledgers_of, cases, name=request.param).value
    return value


def test_ordered_accesses_are_no_races(found: dict[str, list[str]]) -> None:
    assert {case.__name__: found[case.__name__] for case in RIGHT} == {case.__name__: [] for case in RIGHT}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_a_missing_order_is_a_race(found: dict[str, list[str]], case: Callable[[Any, Any], None]) -> None:
    assert any(WRONG[case] in race for race in found[case.__name__]), found[case.__name__]
    assert all(case.__name__ in race for race in found[case.__name__])  # the place


def follow_a_device_address_on_the_host() -> None:
    import ctypes

    import torch
    from accelerator import pretend

    ctypes.string_at(torch.ones(4, device=pretend.device(0)).data_ptr(), 4)


def read_pinned_memory_too_early() -> tuple[list[float], list[float]]:
    import torch
    from accelerator import pretend

    x, here = torch.full((2,), 7.0, device=pretend.device(0)), torch.zeros(2).pin_memory(pretend.NAME)
    here.copy_(x, non_blocking=True)
    early = here.tolist()
    torch.accelerator.synchronize(0)
    return early, here.tolist()


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_host_that_follows_an_address_of_the_device_dies(name: str) -> None:
    outcome = attempt(1, follow_a_device_address_on_the_host, name=name)[0]
    assert outcome.code == -11
    assert "follow_a_device_address_on_the_host" in outcome.stderr


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_a_host_that_reads_pinned_memory_before_the_copy_ended_gets_rubbish(name: str) -> None:
    early, late = on_device(read_pinned_memory_too_early, name=name).value
    assert all(each != each for each in early)
    assert late == [7.0, 7.0]


def wait_in_every_way() -> list[str]:
    import torch
    from accelerator import pretend

    on = pretend.device(0)
    x, event = torch.ones(3, device=on), torch.Event(device=on)
    pretend.clear()
    x.add_(1).mul_(2)  # none
    torch.ones(3).to(on, non_blocking=True)  # none
    event.record()
    x.sum().item()
    x.cpu()
    bool((x > 0).all())
    x.nonzero()
    torch.ones(3).to(on)
    event.synchronize()
    torch.accelerator.current_stream(on).synchronize()
    torch.accelerator.synchronize(on)
    return [found.text for found in pretend.syncs()]


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_every_wait_of_the_host_is_counted_with_its_place(name: str) -> None:
    outcome = on_device(wait_in_every_way, name=name)
    assert outcome.value == [
        "item()",
        "copy to the host",
        "item()",
        "aten::nonzero",
        "copy from the host, blocking",
        "event.synchronize()",
        "stream.synchronize()",
        "synchronize()",
    ]
    assert all("wait_in_every_way" in each for each in outcome.syncs)


def hand_over_by(way: str) -> list[str]:
    """One thread waits for a stream, and another one launches on a second stream; only a lock or a join orders them."""
    import threading
    import time

    import torch
    from accelerator import hosts, pretend

    on = pretend.device(0)
    with hosts.apart():
        pretend.clear()
        x, side, condition, done = torch.zeros(4, device=on), torch.Stream(device=on), threading.Condition(), []
        torch.accelerator.synchronize(on)

        def first() -> None:
            x.add_(1)
            torch.accelerator.current_stream(on).synchronize()
            if way == "a condition":
                with condition:
                    done.append(1)
                    condition.notify_all()
            done.append(1)

        def second() -> None:
            if way == "a condition":
                with condition:
                    condition.wait_for(lambda: done)
            while len(done) < 1 + (way == "a condition"):  # by luck, as far as anybody can know
                time.sleep(0.01)
            with side:
                x.add_(1)

        threads = [threading.Thread(target=each) for each in (first, second)]
        for number, each in enumerate(threads):
            each.start()
            if way == "a join" and not number:
                each.join()
        for each in threads:
            each.join()
        side.synchronize()
    return [str(each) for each in pretend.races()]


@pytest.mark.parametrize(("way", "raced"), [("a join", False), ("a condition", False), ("luck", True)])
def test_threads_kept_apart_know_only_what_they_have_heard_of(way: str, raced: bool) -> None:
    races = on_device(hand_over_by, way).value
    assert bool(races) == raced, races
