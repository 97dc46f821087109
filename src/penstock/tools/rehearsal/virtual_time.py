"""Virtual time: tasks take turns in one thread, and the clock jumps from one event to the next.

Every rank runs the blocking code that it runs in a real training, so each of its threads is a greenlet here: a wait
puts it aside and runs whatever is due next. What is due at the same moment runs in an order that the seed draws, so a
seed stands for one interleaving, and the same seed always gives the same one.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from itertools import count
from queue import Empty
from typing import Any, ParamSpec, TypeVar

from penstock.errors import UsageError
from penstock.runtime.messages.clock import Clock

try:
    from greenlet import GreenletExit, getcurrent, greenlet
except ModuleNotFoundError as error:  # not every installation rehearses
    raise UsageError("a rehearsal needs greenlet; install penstock[rehearsal]") from error

Given = ParamSpec("Given")
Found = TypeVar("Found")
EVERYWHERE = -1  # the rank of tasks that belong to no rank
# Instead of a ticket, this number in the queue asks to look whether the task's limit has come.
_LIMIT = -1


class Task:
    """What runs in turn with others: one thread of a rank, or a fault that waits for its time."""

    __slots__ = ("greenlet", "has_timer", "is_started", "limit", "rank", "ticket")

    def __init__(self, rank: int, run: greenlet) -> None:
        self.rank = rank
        self.greenlet = run
        self.is_started = False
        self.ticket = 0  # Number of its present wait; what was meant to end an earlier one is void.
        self.limit = math.inf  # Time at which its present wait ends at the latest.
        self.has_timer = False  # one timer serves the limits of all its waits, which hardly ever come


class VirtualTime:
    """The events that are due, and the tasks that wait for them."""

    def __init__(self, seed: int, start: float = 0.0) -> None:
        self.now = start
        self.over = False
        self.current: Task
        self._due: list[tuple[float, float, int, Task, int]] = []
        self._draw = random.Random(seed).random
        self._number = count().__next__
        self._hub = getcurrent()
        self._tasks: list[Task] = []
        self._stopped: dict[int, float] = {}  # ranks that stand still, and until when
        self._unstarted: Task | None = None  # due next
        self._held: list[Task] = []  # due while their rank stood still

    def start(self, rank: int, function: Callable[[], object], at: float | None = None) -> Task:
        """Run a function as a task of a rank, from `at` on."""
        task = Task(rank, greenlet(function, self._hub))
        self._tasks.append(task)
        self.wake(task, self.now if at is None else at)
        return task

    # -- from within a task

    def sleep(self, seconds: float) -> None:
        """Let this much time pass."""
        until = self.now + seconds
        while self.now < until:
            self.wait(until)

    def wait(self, until: float = math.inf) -> None:
        """Run others until somebody wakes this task, or until that time; what was waited for may not have come."""
        if self.over:
            raise GreenletExit
        task = self.current
        if until < math.inf:
            self.wake(task, until)
        following = self._next()
        if following is task:
            return
        if following is None or not following.is_started:
            self._unstarted = following
            # The hub starts it, because a greenlet that another one starts counts that one's depth of calls too.
            self._hub.switch()
        else:
            self.current = following
            following.greenlet.switch()
        if self.over:
            raise GreenletExit

    def limit(self, until: float) -> None:
        """Limit the waits of this task from here on: they end at that time (`math.inf`: no limit)."""
        task = self.current
        task.limit = until
        if until < math.inf and not task.has_timer:
            task.has_timer = True
            heapq.heappush(self._due, (until, self._draw(), self._number(), task, _LIMIT))

    def wake(self, task: Task, at: float) -> None:
        """End the present wait of a task at that time, unless something ends it before."""
        heapq.heappush(self._due, (at, self._draw(), self._number(), task, task.ticket))

    # -- from within a fault

    def stop(self, rank: int, until: float = math.inf) -> None:
        """Stop the rank: none of its tasks runs before that time, whatever else ends earlier."""
        self._stopped[rank] = max(until, self._stopped.get(rank, until))
        if until < math.inf:
            self.start(EVERYWHERE, lambda: self._go_on(rank), until)

    def _go_on(self, rank: int) -> None:
        """Let the rank run again, with all that has become due meanwhile, if this was the last of its stops."""
        if self._stopped.get(rank, math.inf) > self.now:
            return
        del self._stopped[rank]
        for task in self._held:
            self.wake(task, self.now)
        self._held.clear()

    def is_stopped(self, rank: int) -> bool:
        """Return whether the rank stands still."""
        return rank in self._stopped

    # -- from outside

    def run(self, is_done: Callable[[], bool], until: float) -> None:
        """Run tasks until `is_done`, which is asked whenever a task has ended, or until that time."""
        self.start(EVERYWHERE, lambda: None, until)
        while not is_done() and self.now < until:
            task, self._unstarted = self._unstarted or self._next(), None
            if task is None:
                return
            self.current = task
            task.is_started = True
            task.greenlet.switch()

    def close(self) -> None:
        """End all tasks; nothing runs after this."""
        self.over = True
        self._due.clear()
        for task in self._tasks:
            if not task.greenlet.dead:
                self.current = task
                task.greenlet.throw()
        self._tasks.clear()

    def _next(self) -> Task | None:
        """Return the task that is due next, and move the clock to its time."""
        due, stopped = self._due, self._stopped
        while due:
            at, _, _, task, ticket = heapq.heappop(due)
            if ticket != task.ticket:
                if ticket != _LIMIT:
                    continue
                task.has_timer = False
                if task.limit > at:
                    if task.limit < math.inf:
                        task.has_timer = True
                        heapq.heappush(due, (task.limit, self._draw(), self._number(), task, _LIMIT))
                    continue
            if stopped and task.rank in stopped:
                self._held.append(task)
                continue
            task.ticket += 1
            self.now = at
            return task
        return None


class RankClock(Clock):
    """The clock of one rank: what it starts and waits for runs on virtual time."""

    def __init__(self, time: VirtualTime, rank: int, file_seconds: float = 0.0) -> None:
        self._time, self._rank = time, rank
        self._file_seconds = file_seconds  # Seconds that each work on a file takes.

    def now(self) -> float:
        return self._time.now

    def sleep(self, seconds: float) -> None:
        self._time.sleep(seconds)

    def event(self) -> VirtualEvent:
        return VirtualEvent(self._time)

    def queue(self) -> VirtualQueue:
        return VirtualQueue(self._time)

    def worker(self, target: Callable[[], None], name: str) -> VirtualWorker:
        return VirtualWorker(self._time, self._rank, target)

    def background(self, name: str) -> VirtualBackground:
        return VirtualBackground(self, name)

    def paced(self, work: Callable[Given, Found]) -> Callable[Given, Found]:
        def takes_time(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            self.sleep(self._file_seconds / 2)
            found = work(*args, **kwargs)
            self.sleep(self._file_seconds / 2)
            return found

        return takes_time


class VirtualEvent:
    """As `threading.Event`."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._is_set = False
        self._waiting: list[Task] = []

    def wait(self, timeout: float) -> bool:
        time = self._time
        until = time.now + timeout
        while not self._is_set and time.now < until:
            self._waiting.append(time.current)
            time.wait(until)
            self._waiting.remove(time.current)
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiting:
            self._time.wake(task, self._time.now)

    def clear(self) -> None:
        self._is_set = False


class VirtualQueue:
    """As `queue.SimpleQueue`, for one task that gets."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._items: deque[Any] = deque()
        self._getting: Task | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._getting is not None:
            self._time.wake(self._getting, self._time.now)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        time = self._time
        until = math.inf if timeout is None else time.now + timeout
        while not self._items:
            if not block or time.now >= until:
                raise Empty
            self._getting = time.current
            time.wait(until)
            self._getting = None
        return self._items.popleft()


class VirtualWorker:
    """As `threading.Thread`."""

    def __init__(self, time: VirtualTime, rank: int, target: Callable[[], None]) -> None:
        self._time, self._rank, self._target = time, rank, target
        self._task: Task | None = None
        self._ended = VirtualEvent(time)

    def start(self) -> None:
        self._task = self._time.start(self._rank, self._run)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.greenlet.dead and not self._time.over

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self._ended.wait(math.inf if timeout is None else timeout)


class VirtualPending:
    """As `concurrent.futures.Future`."""

    def __init__(self, clock: RankClock, work: Callable[[], Any]) -> None:
        self._work = work
        self._ended = clock.event()
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # raised when it is asked for
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.wait(0.0)

    def exception(self, timeout: float | None = None) -> Exception | None:
        if not self._ended.wait(math.inf if timeout is None else timeout):
            raise TimeoutError
        return self._error


class VirtualBackground:
    """As an executor of `concurrent.futures` with one thread."""

    def __init__(self, clock: RankClock, name: str) -> None:
        self._clock = clock
        self._queue = clock.queue()
        self._worker = clock.worker(self._run, name)
        self._worker.start()

    def submit(self, work: Callable[[], Any]) -> VirtualPending:
        pending = VirtualPending(self._clock, work)
        self._queue.put(pending)
        return pending

    def shutdown(self) -> None:
        self._queue.put(None)
        self._worker.join()

    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            pending.run()
