"""Where a pipeline runs: all ranks in this process, or this process as one rank of a group.

Decided once, from what the user passed and from the environment, so that the same script runs on a laptop and under
torchrun. On processes the ranks make sure, before the first step, that they were all given the same pipeline: a
difference that would otherwise show as a hang or as wrong numbers is an error that names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from penstock.devices import backends, check_queues
from penstock.errors import ModelError, PeerFailure, PenstockError, UsageError
from penstock.parallel.group.agreement import agree
from penstock.parallel.group.facts import compared
from penstock.runtime.engine.ranks import calling
from penstock.runtime.engine.recorder import host_name, offsets
from penstock.runtime.state.randomness import StepCounter
from penstock.runtime.transport import ThreadTransport, Transport
from penstock.runtime.transport.distributed.transport import DistributedTransport
from penstock.runtime.transport.shared_memory.transport import SharedMemoryTransport
from penstock.runtime.transport.threads import IN_MEMORY

BUILDING = "Pipeline()"  # the call that ranks are in while they build one
MEASURING_SECONDS = 1800.0  # Others wait so long for the rank that measures the layers for all.
Found = TypeVar("Found")
Given = ParamSpec("Given")
# How processes reach each other, by what `transport=` calls it; the first is the default.
ON_PROCESSES: dict[str, type[DistributedTransport]] = {
    "shared": SharedMemoryTransport,
    "distributed": DistributedTransport,
}
TRANSPORTS = ("threads", *ON_PROCESSES)
TRANSPORT_VARIABLE = "PENSTOCK_TRANSPORT"
# It makes the world of a rehearsal.
REHEARSED: ContextVar[Callable[[], Any] | None] = ContextVar("REHEARSED", default=None)


def collective(call: str) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """Mark a method of a pipeline that every rank must call; where ranks are in different ones, each is named."""

    def decorate(method: Callable[Given, Found]) -> Callable[Given, Found]:
        @wraps(method)
        def named(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            pipe: Any = args[0]
            with pipe.deployment.world.calling(call):
                return method(*args, **kwargs)

        return named

    return decorate


class World:
    """`size` is the number of processes, or None where ranks are threads."""

    def __init__(self, group: Any, size: int | None, timeout: float, requested_transport: str | None = None) -> None:
        self.group, self.size, self.timeout = group, size, timeout
        self.requested_transport = requested_transport  # The user may have asked for none.
        self.transport: Transport | None = None  # this process's, where ranks are processes
        self._informed = False  # the other ranks know what this one was given
        self._one_host = True

    @property
    def kind(self) -> str:
        return "threads of this process" if self.size is None else f"{self.size} processes"

    def describe_link(self, source: int, target: int) -> str:
        return IN_MEMORY if self.transport is None else self.transport.describe_link(source, target)

    @classmethod
    def find(cls, group: Any, mesh: Any, transport: str | None, timeout: float) -> World:
        """Read the arguments, then the environment."""
        transport, source = _choice(transport)
        if group is not None and mesh is not None:
            raise UsageError("pass group= or mesh=, not both")
        if mesh is not None:
            group = mesh.get_group("pp")
        if transport == "threads":
            if group is not None:
                raise UsageError(f"{source} runs all ranks in this process; it takes no group= or mesh=")
            return cls(None, None, timeout)
        if (rehearsed := REHEARSED.get()) is not None:
            found: World = rehearsed()
            return found
        if group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group(backends())
        if group is None and dist.is_initialized() and (dist.get_world_size() > 1 or transport is not None):
            group = dist.group.WORLD
        if group is None:
            if transport is not None:
                raise UsageError(f"{source} needs a process group: start with torchrun, or pass group=")
            return cls(None, None, timeout)
        return cls(group, dist.get_world_size(group), timeout, transport)

    @property
    def rank(self) -> int | None:
        """This process's rank; None where ranks are threads."""
        return None if self.size is None else dist.get_rank(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all, where all must use the same numbers."""
        return not self.rank

    @contextmanager
    def meeting(self) -> Iterator[DistributedTransport | None]:
        """Open a transport for what ranks tell each other while the model is cut; None where ranks are threads.

        It names a rank that is lost meanwhile, and has the patience to wait for one that measures.
        """
        if self.size is None:
            yield None
            return
        transport = DistributedTransport(self.group, max(self.timeout, MEASURING_SECONDS))
        transport.call = BUILDING
        try:
            yield transport
        finally:
            transport.close()

    def check_ranks(self, wanted: int, asked: int | None) -> None:
        """Check that the schedule's ranks are the processes there are."""
        if self.size is not None and wanted != self.size:
            reason = f"ranks={asked}" if asked else f"the schedule needs {wanted} ranks"
            raise UsageError(
                f"{reason}, but the group has {self.size} processes; start torchrun with {wanted} processes"
            )

    def transports(self, ranks: int, devices: Mapping[int, torch.device]) -> Sequence[Transport]:
        """Return one transport for each rank that lives in this process; `devices` has the local ranks' own."""
        if self.size is None:
            return ThreadTransport.group(ranks, timeout=self.timeout, devices=list(map(devices.get, range(ranks))))
        device = next(iter(devices.values()), None)
        if device is not None and self.size > 1:
            check_queues(device)
        return [self._connect(device)]

    def _connect(self, device: torch.device | None) -> Transport:
        assert self.size is not None
        name = self.requested_transport or next(iter(ON_PROCESSES))
        # Where shared memory was asked for by name, nothing else will do.
        options: dict[str, Any] = {"strict": True} if self.requested_transport == "shared" else {}
        self.transport = ON_PROCESSES[name](self.group, self.timeout, device=device, **options)
        return self.transport

    @contextmanager
    def building(self) -> Iterator[None]:
        """Have a rank that cannot build its pipeline tell the others, which would wait for it in `agree`."""
        try:
            yield
        except BaseException as error:
            if self.size is not None and not self._informed:
                transport = self.transport or self._connect(None)
                with suppress(PenstockError), calling(transport, BUILDING):
                    transport.exchange(error if isinstance(error, PeerFailure) else f"{type(error).__name__}: {error}")
            if self.transport is not None:
                self.transport.close()
            raise

    def check_facts(self, facts: Mapping[str, tuple[str, str]], counter: StepCounter) -> None:
        """Check on processes that all have the same schedule, stages and options, and take the first rank's seed."""
        if self.transport is None:
            return
        self._informed = True
        answers = self.all_gather(BUILDING, (dict(facts), counter.seed, host_name()))
        check_built(answers)
        faults = compared([theirs for theirs, _, _ in answers], "rank")
        if faults:
            raise UsageError(f"the ranks were given different pipelines; pass the same on every rank\n  {faults}")
        self._informed = False
        counter.seed = answers[0][1]
        self._one_host = len({host for _, _, host in answers}) == 1

    def built(self) -> None:
        """Wait on processes until all ranks have built what comes after they agreed."""
        if self.transport is None:
            return
        self._informed = True
        check_built(self.all_gather(BUILDING, None))

    def clock_shifts(self, ranks: int) -> tuple[list[float], float]:
        """Measure how far each rank's clock is ahead of rank 0's, and the error of that; one host has one clock."""
        if self.transport is None or self._one_host:
            return [0.0] * ranks, 0.0
        with self.calling("record()"):
            return offsets(self.transport)

    def same_on_all(self, call: str, find: Callable[[], Found | None], what: str) -> tuple[Found | None, bool]:
        """Return what the ranks that see the batch find, and whether all do. An error of one is told to all."""
        if self.transport is None:
            return find(), True
        answers = agree(find, lambda answer: self.all_gather(call, answer))
        found: list[tuple[int, Found]] = [(rank, other) for rank, other in enumerate(answers) if other is not None]
        if any(other != found[0][1] for _, other in found):
            raise ModelError(f"the ranks were given batches of different size {what}: {found}")
        return found[0][1] if found else None, len(found) == len(answers)

    def all_gather(self, call: str, value: Any) -> list[Any]:
        """Return what every rank says in this call, which all must make; on threads there is one to say it."""
        if self.transport is None:
            return [value]
        with self.calling(call):
            return self.transport.exchange(value)

    def calling(self, call: str) -> AbstractContextManager[None]:
        """Surround a call that all must make; an outer call counts."""
        return nullcontext() if self.transport is None else calling(self.transport, call)


def check_built(answers: Sequence[Any]) -> None:
    """Raise the error with which a rank answers that cannot build its pipeline, or the loss that it has heard of."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, PeerFailure):
            raise answer
        if isinstance(answer, str):
            raise PeerFailure(rank, f"it could not build its pipeline: {answer}")


def _choice(asked: str | None) -> tuple[str | None, str]:
    """Return the transport that was asked for, by argument or else by the environment, and how that was said."""
    source = f"transport={asked!r}"
    if asked is None:
        asked = os.environ.get(TRANSPORT_VARIABLE, "").strip().lower() or None
        source = f"{TRANSPORT_VARIABLE}={asked}"
    if asked not in (None, *TRANSPORTS):
        raise UsageError(f"{source}: choose one of {', '.join(map(repr, TRANSPORTS))}, or leave it out")
    return asked, source
