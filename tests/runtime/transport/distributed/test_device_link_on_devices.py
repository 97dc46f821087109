"""Pipelines whose ranks have a device each, on the stand-in with NCCL's rules: messages, and what becomes of failures.

That every family is exact there is tested in `tests/accelerator`.
"""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import attempt, on_ranks
from tiers import mostly_slow

FILES = ("device_link.py", "incoming.py", "outgoing.py", "links.py", "transfers.py", "layout.py", "tensor_places.py")


def make(kind: str, **options: Any) -> Any:
    """A pipeline of two ranks, the same model on this rank's device, and the batches of some steps."""
    import copy

    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn

    import penstock

    class Pair(nn.Module):
        """Passes several tensors and a number."""

        def __init__(self, place: int) -> None:
            super().__init__()
            self.place, self.a, self.b = place, nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, given: Any) -> Any:
            x, y = (given, given * 0.5) if self.place == 0 else (given[0], given[1]["y"])
            x, y = torch.tanh(self.a(x)), torch.tanh(self.b(y)) + x
            return x + y if self.place == 3 else (x, {"y": y, "n": 3})

    torch.manual_seed(0)
    layers = [Pair(place) if kind == "several" else nn.Linear(6, 6) for place in range(4)]
    model = nn.Sequential(*layers).double()
    mine = pretend.device(dist.get_rank())
    whole = copy.deepcopy(model).to(mine)
    for layer in (layers[1], layers[3]):  # one of each stage
        layer.register_forward_pre_hook(options.get("before", lambda module, given: None))
    options.pop("before", None)
    homes = options.pop("homes", [pretend.device(0), pretend.device(1)])
    pipe = penstock.Pipeline(
        model, microbatches=4, loss_fn=nn.MSELoss(), devices=homes, timeout=options.pop("timeout", 20), **options
    )
    lengths = [5, 3, 5, 2, 3] if kind == "lengths" else [4] * 3
    drawn = torch.Generator().manual_seed(1)
    batches = [[torch.randn(8, length, 6, generator=drawn).double() for _ in "xy"] for length in lengths]
    home = homes[dist.get_rank() % 2]
    whole.to(home)
    return pipe, whole, [[each.to(home) for each in batch] for batch in batches]


def trained(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """What some steps do to gradients, and how many operations and synchronisations of ours each takes."""
    from accelerator import pretend
    from torch import nn

    pipe, whole, batches = make(kind, **options)
    for x, y in batches:
        for one, other in zip(x.chunk(4), y.chunk(4), strict=True):
            (nn.MSELoss()(whole(one), other) / 4).backward()
    found: dict[str, Any] = {"operations": [], "syncs": []}
    for x, y in batches:
        before, operations = len(pretend.syncs()), pretend.messages()
        pipe.step(x, target=y)
        found["operations"].append(pretend.messages() - operations)
        found["syncs"] += [each.place for each in pretend.syncs()[before:] if each.place.startswith(FILES)]
    wanted = dict(whole.named_parameters())
    found["exact"] = all(bool((wanted[name].grad == each.grad).all()) for name, each in pipe.named_parameters())
    found["links"] = sorted(pipe.deployment.world.transport._links.devices)
    pipe.close()
    return found


@pytest.mark.parametrize("kind", mostly_slow(["one", "several", "lengths"], "lengths"))
@pytest.mark.parametrize("schedule", mostly_slow(["1f1b", "zb-v"], "1f1b"))
def test_a_message_is_one_operation_whatever_its_shapes_and_waits_for_no_device(schedule: str, kind: str) -> None:
    """Each tensor was one operation, and one of another length, or at another address, went through the host."""
    stages = 4 if schedule == "zb-v" else 2
    outcomes = on_ranks(2, trained, kind, {"schedule": schedule, "stages": stages})
    messages = 4 * {"1f1b": 2, "zb-v": 4}[schedule]
    for outcome in outcomes:
        assert outcome.value["exact"]
        assert outcome.races == []
        assert outcome.value["syncs"] == []
        assert outcome.value["links"] == [(0, 1), (1, 0)]
        first, *others = outcome.value["operations"]
        assert set(others) == {messages}
        assert first == messages + 2  # the first bytes of both links


def trained_deferred(schedule: str) -> dict[str, Any]:
    from accelerator import pretend

    pretend.defer(lag=0.002)
    return trained("several", {"schedule": schedule, "stages": 2 if schedule == "1f1b" else 4})


@pytest.mark.parametrize("schedule", mostly_slow(["1f1b", "zb-v", "dualpipe-v"], "zb-v"))
def test_a_pipeline_whose_hosts_are_ahead_of_their_devices_is_exact(schedule: str) -> None:
    for outcome in on_ranks(2, trained_deferred, schedule):
        assert outcome.value["exact"]
        assert outcome.races == []
        assert outcome.deadlocks == []
        assert outcome.value["syncs"] == []


def trained_with_waits_for_devices(family: str, where: str) -> list[float]:
    """How far gradients are from the plain loop's, where layers wait for all that their device has to do."""
    import copy

    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn

    import penstock

    def wait(x: Any) -> Any:
        torch.accelerator.synchronize(x.device)
        return None

    def after(module: Any, given: Any, output: Any) -> None:
        wait(output)
        if where == "everywhere":
            output.register_hook(wait)

    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2 * ranks)]).double()
    alone, x, y = copy.deepcopy(model), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    for _ in range(2):
        nn.functional.mse_loss(alone(x), y).backward()
    wanted = dict(alone.named_parameters())
    for number, layer in enumerate(model):
        if where == "everywhere" or number == 0:
            layer.register_forward_hook(after)
    pretend.defer()
    options = {"stages": 2 * ranks, "microbatches": 4, "schedule": family, "timeout": 10}
    with penstock.Pipeline(model, loss_fn=nn.MSELoss(), **options) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        found = {name: each.grad.cpu() for name, each in pipe.named_parameters() if each.grad is not None}
    return [float((each - wanted[name].grad).abs().max()) for name, each in found.items()]  # type: ignore[operator]


WAITS = [("dualpipe-v", 2, "everywhere"), *((name, 3, "first") for name in ("zb-v", "interleaved-1f1b"))]
WAITS += [(name, 3, "everywhere") for name in ("zb-v", "interleaved-1f1b", "dualpipe-v")]


@pytest.mark.parametrize(("family", "ranks", "where"), mostly_slow(WAITS, WAITS[0]))
def test_hosts_may_wait_for_all_that_their_devices_have_to_do(family: str, ranks: int, where: str) -> None:
    """A user's `synchronize()`, or memory that is given back. Receives were queued only where their values were
    needed: two hosts waited, each behind a send to the other, until the timeout."""
    for outcome in on_ranks(ranks, trained_with_waits_for_devices, family, where):
        assert outcome.value
        assert max(outcome.value) < 1e-12
        assert outcome.races == []
        assert outcome.deadlocks == []


def trained_on_an_axis() -> dict[str, Any]:
    import torch.distributed as dist
    from accelerator import pretend
    from torch.distributed.device_mesh import init_device_mesh

    rank = dist.get_rank()
    mesh = init_device_mesh(pretend.NAME, (2, 2), mesh_dim_names=("other", "pp"))
    homes = [pretend.device(rank - rank % 2 + each) for each in range(2)]
    return trained("several", {"schedule": "1f1b", "stages": 2, "group": mesh.get_group("pp"), "homes": homes})


@pytest.mark.slow
def test_an_axis_of_a_mesh_may_be_the_group() -> None:
    for outcome in on_ranks(4, trained_on_an_axis):
        assert outcome.value["exact"]
        assert outcome.races == []
        assert outcome.value["links"] == [(0, 1), (1, 0)]


def trained_in_a_group_of(backend: str) -> dict[str, Any]:
    import torch.distributed as dist
    from accelerator import pretend

    group = dist.new_group(backend=backend.format(pretend.NAME))
    return trained("several", {"schedule": "1f1b", "stages": 2, "group": group})


@pytest.mark.parametrize(("backend", "eager"), [("{}:pretendccl", False), ("{}:pretendccl", True), ("gloo", False)])
def test_a_group_may_have_one_backend_only(backend: str, eager: bool) -> None:
    for outcome in on_ranks(2, trained_in_a_group_of, backend, eager=eager):
        assert outcome.value["exact"]
        assert outcome.races == []
        assert bool(outcome.value["links"]) == (backend != "gloo")  # else through the host


def trained_beside_the_cpu(homes: str) -> dict[str, Any]:
    from accelerator import pretend

    devices = [pretend.device(rank) if home == "d" else "cpu" for rank, home in enumerate(homes)]
    import torch

    return trained("several", {"schedule": "1f1b", "stages": 2, "homes": [torch.device(each) for each in devices]})


@pytest.mark.parametrize("homes", mostly_slow(["dc", "cd"], "dc"))
def test_a_rank_on_the_cpu_and_one_on_a_device_meet_in_the_host(homes: str) -> None:
    """The one sent by NCCL what the other expected by gloo."""
    for outcome in on_ranks(2, trained_beside_the_cpu, homes):
        assert outcome.value["exact"]
        assert outcome.races == []
        assert outcome.value["links"] == []


# -- hosts ahead of their devices, and failures


def opened(timeout: float = 20.0) -> Any:
    """A transport with one channel each way, whose device is this rank's."""
    import torch.distributed as dist
    from accelerator import pretend

    from penstock.runtime.transport.channel import Channel
    from penstock.runtime.transport.distributed.transport import DistributedTransport

    pretend.defer()
    transport = DistributedTransport(timeout=timeout, device=pretend.device(dist.get_rank()))
    transport.open([Channel(0, 1, "F", 0, 1), Channel(1, 0, "B", 1, 0)])
    return transport


def goes_on_while_a_kernel_hangs() -> Any:
    """Rank 0's device does not compute what it sends before rank 1's host has done all of its step."""
    import torch
    from accelerator import pretend

    transport = opened()
    on = transport.device
    if transport.rank == 0:
        pretend.hang(0)
        for microbatch in range(3):
            transport.send(0, microbatch, torch.full((4,), microbatch + 1.0, device=on))
        transport.flush()
        transport.exchange("sent")
        pretend.let_go()
        transport.close()  # which waits for its device: a process that ends takes what it still sends along
        return None
    values = [transport.receive(0, microbatch) * 10 for microbatch in range(3)]
    computed = torch.Event(device=on)
    computed.record()
    transport.flush()
    is_ahead = not computed.query()  # nobody has let go yet: rank 0 waits for this rank's report
    transport.exchange("received")
    return is_ahead, [value.tolist() for value in values]


def test_hosts_run_ahead_of_their_devices_for_a_whole_step() -> None:
    outcomes = on_ranks(2, goes_on_while_a_kernel_hangs)
    assert outcomes[1].value == (True, [[10.0] * 4, [20.0] * 4, [30.0] * 4])
    assert [each.races for each in outcomes] == [[], []]


def computes_while_a_send_waits() -> Any:
    """Rank 1's host is held up in C, so that nothing receives; rank 0 sends to it and computes on."""
    import ctypes
    import time

    import torch
    from accelerator import pretend

    transport = opened()
    transport.exchange("connected")
    if transport.rank == 1:
        ctypes.PyDLL(None).usleep(2_000_000)  # which keeps the interpreter from all threads
        value = transport.receive(0, 0).tolist()
        transport.flush()
        transport.close()
        return value
    transport.send(0, 0, torch.ones(3, device=transport.device))
    torch.ones(3, device=transport.device).add_(1)
    computed, begun = torch.Event(device=transport.device), time.monotonic()
    computed.record()
    while not computed.query() and time.monotonic() < begun + 1.0:
        time.sleep(0.01)
    found = computed.query(), "send of" in pretend.waits()
    transport.flush()
    transport.close()
    return found


def test_what_a_rank_computes_does_not_wait_for_what_it_has_sent() -> None:
    """The stream that computes waited for each send as that was finished."""
    outcomes = on_ranks(2, computes_while_a_send_waits)
    assert [each.value for each in outcomes] == [(True, True), [1.0] * 3]


def closes_before_its_device_has_sent() -> Any:
    import torch
    from accelerator import pretend

    transport, value = opened(), None
    if transport.rank == 0:
        pretend.sleep(1.0)
        transport.send(0, 0, torch.ones(3, device=transport.device))
    else:
        value = transport.receive(0, 0)
    transport.flush()
    transport.exchange(None)
    if transport.rank == 0:
        transport.close()
        return None
    found = value.tolist()
    transport.close()
    return found


def test_closing_waits_for_what_the_device_has_yet_to_send() -> None:
    assert [each.value for each in on_ranks(2, closes_before_its_device_has_sent)] == [None, [1.0] * 3]


def loses_the_sender(how: str) -> Any:
    """Rank 0 announces a tensor and dies, or stands still, before its device has sent it; rank 1 reads it meanwhile."""
    import os
    import signal
    import time
    from contextlib import suppress

    import torch
    from accelerator import pretend

    from penstock.errors import PeerFailure

    transport = opened(timeout=2.0)
    others = transport.exchange(os.getpid())
    if transport.rank == 0:
        pretend.hang(0)
        transport.send(0, 0, torch.ones(4, device=transport.device))
        time.sleep(1.0)  # its announcement is on its way
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
    value, start = transport.receive(0, 0), time.monotonic()
    with suppress(RuntimeError):  # a kernel that was aborted
        value.sum().item()
    seconds = time.monotonic() - start
    with pytest.raises(PeerFailure) as caught:
        transport.exchange(None)
    transport.close()
    with suppress(ProcessLookupError):
        os.kill(others[0], signal.SIGKILL)
    return seconds, str(caught.value)


@pytest.mark.parametrize("how", mostly_slow(["dies", "stands still"], "dies"))
def test_a_rank_that_waits_in_a_kernel_for_one_that_is_lost_is_released(how: str) -> None:
    """Only gloo's connections were closed: the kernel stayed, and with it the host that read its result."""
    lost, told = attempt(2, loses_the_sender, how, grouped=True, limit=40)
    assert lost.code != 0
    assert not told.error, told.error
    seconds, text = told.value
    assert seconds < 20
    assert "rank 0 failed" in text


def receives_late() -> Any:
    """Rank 1 waits in a kernel for longer than the user's group allows an operation."""
    import torch
    from accelerator import pretend

    transport, value = opened(), None
    if transport.rank == 0:
        pretend.sleep(PATIENCE + 3)
        transport.send(0, 0, torch.ones(3, device=transport.device))
    else:
        value = transport.receive(0, 0).tolist()
    transport.flush()
    transport.close()
    return value


PATIENCE = 5.0  # seconds


def test_the_watchdog_does_not_end_a_process_whose_peer_takes_its_time() -> None:
    """It ends processes whose operations take longer than the group's time-out, as NCCL's does."""
    outcomes = on_ranks(2, receives_late, timeout=PATIENCE)
    assert [each.value for each in outcomes] == [None, [1.0] * 3]


def fails_once(how: str, who: int) -> Any:
    """The second of three steps fails on one rank; what each step said, and what the third one's gradients are."""
    import torch
    import torch.distributed as dist
    from accelerator import pretend
    from torch import nn

    calls, rank = [0], dist.get_rank()

    def trap(module: Any, given: Any) -> None:
        calls[0] += 1
        if rank == who and calls[0] == 6:  # in the second step
            if how == "an error":
                raise ValueError("one microbatch is refused")
            pretend.native.limit_memory(torch.accelerator.memory_allocated(rank) + 64)

    pipe, whole, batches = make("several", schedule="1f1b", stages=2, before=trap)
    said = []
    for x, y in batches:
        pipe.zero_grad()
        try:
            pipe.step(x, target=y)
            said.append("")
        except Exception as error:
            said.append(str(error).partition("\n")[0])
        pretend.native.limit_memory(0)
    x, y = batches[-1]
    for one, other in zip(x.chunk(4), y.chunk(4), strict=True):
        (nn.MSELoss()(whole(one), other) / 4).backward()
    wanted = dict(whole.named_parameters())
    grads = [(wanted[name].grad, each.grad) for name, each in pipe.named_parameters()]
    exact = all(other is not None and torch.equal(one, other) for one, other in grads)
    pipe.close()
    return said, exact


@pytest.mark.parametrize(
    ("how", "who"),
    mostly_slow([(how, who) for how in ("an error", "memory") for who in (0, 1)], ("memory", 1)),
)
def test_after_a_failure_on_a_device_the_next_step_is_exact(how: str, who: int) -> None:
    """A drain waited twice for what a device brings, or had no memory for it."""
    outcomes = on_ranks(2, fails_once, how, who, limit=40)
    for outcome in outcomes:
        (first, failed, third), exact = outcome.value
        assert (first, third) == ("", "")
        assert exact
        assert f"rank {who} failed" in failed
        assert ("ValueError" if how == "an error" else "OutOfMemoryError") in failed
        assert how == "an error" or "MiB are allocated" in failed
        assert outcome.races == []
