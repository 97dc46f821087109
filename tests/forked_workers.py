"""`pytest --workers 3`: one process collects the tests, and forks the workers that run them.

Every worker of pytest-xdist is a new Python, which loads torch and collects all tests again: 15 seconds of processor
time for each. A fork has all of it at once. The tests of a file go to one worker, because many look at what one group
of processes, one browser or one search has found; with `--share-files`, workers without a file take over half of what
another one's file has left. A worker that dies fails the test that it ran, and a new one goes on. What workers share is
in servers.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

WORST = 1  # of the exit codes of a worker that came to its end: some of its tests have failed


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("workers")
    group.addoption("--workers", type=int, default=0, help="run the tests in so many forks of this process")
    group.addoption("--share-files", action="store_true", help="let an idle worker take over tests of another's file")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Let forks run the tests; in a fork, return when it has run its last one."""
    options = session.config.option
    if not options.workers or options.collectonly or session.testsfailed:
        return None
    Distribution(session, options.workers, options.share_files).run()
    return True


class Worker:
    """A fork that runs tests, as the process sees it that hands them out."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self.end = os.pidfd_open(pid)
        self.waiting: deque[int] = deque()  # of its file, not yet handed out
        self.given: deque[int] = deque()  # the test that it runs, and the one after that
        self.is_open = True


class Distribution:
    """The tests of a session, and the workers that run them; tests are numbers here."""

    def __init__(self, session: pytest.Session, workers: int, share: bool) -> None:
        self.session, self.share = session, share
        numbers = groupby(range(len(session.items)), key=lambda number: session.items[number].path)
        self.files = deque(deque(tests) for _, tests in numbers)
        self.workers: list[Worker] = []
        self.count = workers

    def run(self) -> bool:
        """Run all tests, and return whether this process is the one that reports them."""
        try:
            while self.files and len(self.workers) < self.count:
                if not self._start():
                    return False
            while self.workers:
                ready = wait([each.pipe for each in self.workers if each.is_open] + [each.end for each in self.workers])
                for worker in list(self.workers):
                    if worker.pipe in ready:
                        self._listen(worker)
                    elif worker.end in ready and not self._bury(worker):
                        return False
        finally:
            for worker in self.workers:
                os.kill(worker.pid, signal.SIGTERM)
        return True

    def _start(self) -> bool:
        """Fork a worker; False is for the worker, once it has run its last test."""
        if threading.active_count() > 1:
            raise pytest.UsageError(f"--workers forks, and threads were started before: {threading.enumerate()}")
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            theirs.close()
            self.workers.append(Worker(pid, ours))
            return True
        for other in self.workers:
            other.pipe.close()
            os.close(other.end)
        self.workers.clear()
        ours.close()
        serve(self.session, theirs)
        return False

    def _listen(self, worker: Worker) -> None:
        try:
            kind, content = worker.pipe.recv()
        except EOFError:
            worker.is_open = False
            return
        hook, config = self.session.config.hook, self.session.config
        if kind == "report":
            self._report(hook.pytest_report_from_serializable(config=config, data=content))
            return
        if kind == "finished":
            item = self.session.items[worker.given.popleft()]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if kind == "ahead":  # Another file is not begun ahead: somebody who is idle may take it.
            number = worker.waiting.popleft() if worker.waiting else None
        else:
            number = worker.given.popleft() if worker.given else self._next(worker)
        if number is not None:
            worker.given.append(number)
        worker.pipe.send(number)

    def _report(self, report: pytest.TestReport) -> None:
        self.session.config.hook.pytest_runtest_logreport(report=report)
        if self.session.shouldfail:
            raise self.session.Failed(self.session.shouldfail)

    def _next(self, worker: Worker) -> int | None:
        if not worker.waiting and self.files:
            worker.waiting = self.files.popleft()
        if not worker.waiting and self.share:
            richest = max(self.workers, key=lambda each: len(each.waiting))
            worker.waiting.extendleft(richest.waiting.pop() for _ in range(len(richest.waiting) // 2))
        return worker.waiting.popleft() if worker.waiting else None

    def _bury(self, worker: Worker) -> bool:
        """Take note of a worker's end; where it died in a test, that has failed, and another worker goes on."""
        self.workers.remove(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        os.close(worker.end)
        worker.pipe.close()
        if not worker.given:
            if not 0 <= code <= WORST:
                raise self.session.Interrupted(f"a worker ended with {code} after its last test")
            return True
        item = self.session.items[worker.given.popleft()]
        text = f"the worker that ran this test ended in its midst, with {code}"
        self._report(pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call"))
        worker.given.extend(worker.waiting)
        if worker.given:
            self.files.appendleft(worker.given)
        return not self.files or self._start()


class Reports:
    """The part of a worker that sends what came of its tests."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("report", data))


def serve(session: pytest.Session, pipe: Connection) -> None:
    """Run what is handed out, in a fork; its own way of reporting and capturing is not that of the one it came from."""
    config: Any = session.config
    config.workerinput = {}  # By this, parts of pytest know that another process writes reports and caches.
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # Its file is the parent's.
    capture.start_global_capturing()
    config.pluginmanager.register(Reports(config, pipe))

    def ask(word: str) -> int | None:
        pipe.send((word, None))
        number: int | None = pipe.recv()
        return number

    number = ask("begun")
    while number is not None:
        following = ask("ahead")
        after = None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=session.items[number], nextitem=after)
        number = ask("finished")
