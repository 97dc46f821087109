"""Virtual time: tasks run in the order of their events, and nothing waits for the machine's clock."""

from __future__ import annotations

from queue import Empty

import pytest

from penstock.tools.rehearsal.virtual_time import RankClock, VirtualTime


def test_tasks_take_turns_in_the_order_of_time() -> None:
    time, seen = VirtualTime(seed=0), []

    def sleeper(name: str, seconds: float) -> None:
        for _ in range(2):
            time.sleep(seconds)
            seen.append((name, time.now))

    time.start(0, lambda: sleeper("slow", 5.0))
    time.start(1, lambda: sleeper("fast", 2.0))
    time.run(lambda: len(seen) == 4, until=100)
    time.close()
    assert seen == [("fast", 2.0), ("fast", 4.0), ("slow", 5.0), ("slow", 10.0)]


def test_the_seed_draws_who_is_first_among_those_due_at_once() -> None:
    def order(seed: int) -> tuple[int, ...]:
        time, seen = VirtualTime(seed), []
        for number in range(4):
            time.start(number, lambda number=number: seen.append(number))  # type: ignore[misc]
        time.run(lambda: len(seen) == 4, until=1)
        time.close()
        return tuple(seen)

    assert order(5) == order(5)
    assert len({order(seed) for seed in range(20)}) > 5


def test_queues_events_and_workers_are_those_of_threads() -> None:
    time, seen = VirtualTime(seed=0), []
    clock = RankClock(time, 0)
    queue, event = clock.queue(), clock.event()

    def main() -> None:
        worker = clock.worker(lambda: (clock.sleep(3), queue.put("item"), event.set()), "worker")
        worker.start()
        with pytest.raises(Empty):
            queue.get(True, 1.0)
        seen.append((time.now, worker.is_alive(), event.wait(1.0)))
        seen.append((queue.get(), time.now, event.wait(1.0)))
        worker.join()
        seen.append((time.now, worker.is_alive()))

    time.start(0, main)
    time.run(lambda: len(seen) == 3, until=100)
    time.close()
    assert seen == [(1.0, True, False), ("item", 3.0, True), (3.0, False)]


def test_a_rank_that_is_stopped_finds_everything_late() -> None:
    time, seen = VirtualTime(seed=0), []

    def main() -> None:
        time.sleep(2.0)
        seen.append(time.now)

    time.start(3, main)
    time.start(-1, lambda: time.stop(3, 7.0), at=1.0)
    time.start(-1, lambda: time.stop(3, 4.0), at=3.0)  # ends first, and the longer stop goes on
    time.run(lambda: bool(seen), until=100)
    time.close()
    assert seen == [7.0]


def test_many_tasks_start_each_other() -> None:
    """A greenlet counts the calls of whoever starts it: a thousand in a row once came to Python's limit."""
    time, seen = VirtualTime(seed=0), []
    for number in range(3000):
        time.start(number, lambda: (time.sleep(1.0), seen.append(time.now)))
    time.run(lambda: len(seen) == 3000, until=100)
    time.close()
    assert set(seen) == {1.0}
