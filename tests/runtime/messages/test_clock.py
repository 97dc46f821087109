"""The machine's clock: time goes on, and what it starts runs beside everything else."""

from __future__ import annotations

import threading

from penstock.runtime.messages.clock import CLOCK


def test_time_passes_while_it_sleeps() -> None:
    begin = CLOCK.now()
    CLOCK.sleep(0.001)
    assert CLOCK.now() > begin


def test_a_worker_hears_what_is_put_into_a_queue_and_is_a_daemon() -> None:
    queue, done = CLOCK.queue(), CLOCK.event()
    heard: list[str] = []

    def work() -> None:
        heard.append(f"{queue.get()} {threading.current_thread().daemon}")
        done.set()

    worker = CLOCK.worker(work, "worker")
    worker.start()
    queue.put("news")
    assert done.wait(60)
    worker.join(60)
    assert heard == ["news True"]
    assert not worker.is_alive()
