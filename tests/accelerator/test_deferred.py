"""Deferred, the host runs ahead of the device: what is only so on a GPU is so here, too."""

from __future__ import annotations

import pytest
from accelerator.harness import NAMES, attempt, on_device, on_ranks
from tiers import mostly_slow

KERNEL = 0.3  # seconds


def run_ahead() -> dict[str, float]:
    import time

    import torch
    from accelerator import pretend

    pretend.defer()
    on = pretend.device(0)
    x, began = torch.ones(4, device=on), torch.Event(device=on, enable_timing=True)
    ended = torch.Event(device=on, enable_timing=True)
    start = time.monotonic()
    began.record()
    pretend.sleep(KERNEL)
    x.mul_(3)
    ended.record()
    queried, launched = ended.query(), time.monotonic() - start
    value = x.sum().item()
    return {
        "launched": launched,
        "queried": queried,
        "value": value,
        "waited": time.monotonic() - start,
        "by events": began.elapsed_time(ended) / 1000,
    }


@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_the_host_goes_on_until_it_reads(name: str) -> None:
    outcome = on_device(run_ahead, name=name)
    assert outcome.value["launched"] < outcome.value["waited"]
    assert not outcome.value["queried"]
    assert outcome.value["value"] == 12
    assert outcome.value["waited"] >= KERNEL
    assert outcome.value["by events"] >= KERNEL
    assert outcome.races == []


def hang_and_go_on() -> dict[str, object]:
    import torch
    from accelerator import pretend

    pretend.defer()
    on, other = pretend.device(0), pretend.device(1)
    x, y = torch.zeros(2, device=on), torch.zeros(2, device=other)
    torch.accelerator.synchronize(on)
    pretend.hang(0)
    x.add_(1)
    done = torch.Event(device=on)
    done.record()
    y.add_(2)  # another device runs
    found = {"other": y.tolist(), "stuck": not done.query()}
    pretend.let_go()
    return {**found, "then": x.tolist()}


def test_a_kernel_that_hangs_stops_its_stream_and_not_the_host() -> None:
    assert on_device(hang_and_go_on).value == {"other": [2.0, 2.0], "stuck": True, "then": [1.0, 1.0]}


def fail_late() -> dict[str, object]:
    import torch
    from accelerator import pretend

    pretend.defer()
    on = pretend.device(0)
    table, wrong = torch.ones(4, 2, device=on), torch.tensor([9], device=on)
    found: dict[str, object] = {"launched": torch.nn.functional.embedding(wrong, table).shape}
    for each in ("first", "second"):
        try:
            torch.accelerator.synchronize(on)
        except RuntimeError as error:
            found[each] = str(error)
    return found


def test_an_error_in_a_kernel_is_reported_late_and_at_every_wait() -> None:
    outcome = on_device(fail_late)
    assert outcome.value["launched"] == (1, 2)
    assert "reported late" in outcome.value["first"]
    assert outcome.value["first"] == outcome.value["second"]
    assert "aten::embedding" in outcome.errors[0] or "aten::index_select" in outcome.errors[0]


def read_pinned_memory_too_early() -> tuple[list[float], list[float]]:
    import torch
    from accelerator import pretend

    pretend.defer()
    on = pretend.device(0)
    x, here = torch.full((2,), 7.0, device=on), torch.zeros(2).pin_memory(pretend.NAME)
    pretend.sleep(KERNEL)
    here.copy_(x, non_blocking=True)
    early = here.tolist()
    torch.accelerator.synchronize(on)
    return early, here.tolist()


def test_a_copy_to_pinned_memory_arrives_when_it_is_waited_for() -> None:
    assert on_device(read_pinned_memory_too_early).value == ([0.0, 0.0], [7.0, 7.0])


def overlap_a_message() -> dict[str, object]:
    """The receiver's host and its other streams go on while a message has not come."""
    import torch
    import torch.distributed as dist
    from accelerator import pretend

    pretend.defer()
    rank = dist.get_rank()
    on = pretend.device(rank)
    x = torch.full((3,), float(rank), device=on)
    if rank == 0:
        pretend.sleep(KERNEL)
        dist.send(x + 5, 1)
        torch.accelerator.synchronize(on)
        return {}
    work = dist.irecv(x, 0)
    work.wait()  # the stream, and not the host
    y = x * 2
    early = work.is_completed()
    side = torch.Stream(device=on)
    with side:
        z = torch.ones(2, device=on) + 1
    side.synchronize()
    return {"early": early, "beside": (z + 0).tolist() if early else "ran", "value": y.tolist()}


def test_work_wait_stops_the_stream_and_not_the_host() -> None:
    outcomes = on_ranks(2, overlap_a_message)
    assert outcomes[1].value == {"early": False, "beside": "ran", "value": [10.0] * 3}
    assert [each.races for each in outcomes] == [[], []]


def wait_for_a_device_that_sends() -> bool:
    import time

    import torch
    import torch.distributed as dist
    from accelerator import pretend

    pretend.defer()
    rank = dist.get_rank()
    x = torch.ones(3, device=pretend.device(rank))
    (dist.recv if rank else dist.send)(x, 1 - rank)  # which connects the two
    if rank:
        time.sleep(KERNEL)
        dist.recv(x, 0)
        torch.accelerator.synchronize(1)
        return True
    work = dist.isend(x, 1)
    torch.accelerator.synchronize(0)
    return bool(work.is_completed())


def test_a_host_that_waits_for_a_device_waits_for_its_communicators_too() -> None:
    """As `cudaDeviceSynchronize` does; to wait for a stream is to wait for that alone."""
    assert [each.value for each in on_ranks(2, wait_for_a_device_that_sends)] == [True, True]


def wait_for_devices_behind_sends_to_each_other() -> None:
    import torch
    import torch.distributed as dist
    from accelerator import pretend

    pretend.defer()
    rank = dist.get_rank()
    x = torch.ones(3, device=pretend.device(rank))
    (dist.recv if rank else dist.send)(x, 1 - rank)
    dist.isend(x, 1 - rank)
    torch.accelerator.synchronize(rank)


def test_hosts_that_wait_for_devices_which_send_to_each_other_are_a_deadlock() -> None:
    for rank, each in enumerate(attempt(2, wait_for_devices_behind_sends_to_each_other, grouped=True)):
        assert "NCCL would hang" in each.error
        assert f"needs rank {1 - rank}'s host, which waits for" in each.error


def deadlock_on_streams() -> str:
    """Nobody's host waits for a message: only streams do, and then the host for a stream."""
    import torch
    import torch.distributed as dist
    from accelerator import pretend

    pretend.defer()
    rank = dist.get_rank()
    on = pretend.device(rank)
    x = torch.zeros(3, device=on)
    dist.irecv(x, 1 - rank).wait()
    work = dist.isend(x + 1, 1 - rank)
    torch.accelerator.synchronize(on)
    work.wait()
    return "went on"


def test_a_deadlock_of_streams_is_found_while_hosts_run_ahead() -> None:
    for each in attempt(2, deadlock_on_streams, grouped=True):
        assert "reported late" in each.error
        assert "NCCL would hang" in each.error


def wait_for_a_rank_that_is_gone(how: str) -> str:
    """Rank 0 ends; a kernel of rank 1 waits for its message until the communicator is aborted or the watchdog comes."""
    import os
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from accelerator import pretend

    pretend.defer()
    rank = dist.get_rank()
    x = torch.zeros(3, device=pretend.device(rank))
    if rank == 0:
        dist.send(x, 1)
        torch.accelerator.synchronize(0)
        os._exit(3)
    dist.recv(x, 0)
    torch.accelerator.synchronize(1)
    work = dist.irecv(x, 0)
    if how == "abort":
        time.sleep(0.2)
        assert not work.is_completed()
        dist.group.WORLD._get_backend(x.device).abort()  # type: ignore[union-attr]
        while not work.is_completed():
            time.sleep(0.01)
        torch.accelerator.synchronize(1)  # the kernel has ended
        return str(work.exception())
    if how == "wait with a time-out":
        try:
            work.wait(timedelta(seconds=0.2))
        except RuntimeError as error:
            return str(error)
    time.sleep(20)
    return "nobody came"


def test_a_kernel_that_waits_for_a_dead_peer_ends_when_it_is_aborted() -> None:
    outcome = attempt(2, wait_for_a_rank_that_is_gone, "abort", grouped=True)[1]
    assert outcome.error == ""
    assert "was aborted" in outcome.value


def test_a_host_that_waits_with_a_time_out_is_told() -> None:
    outcome = attempt(2, wait_for_a_rank_that_is_gone, "wait with a time-out", grouped=True)[1]
    assert "time-out of 200 ms: receive of 12 bytes from rank 0" in outcome.value


def drop_groups_whose_kernels_wait() -> str:
    """Rank 1 drops groups one after the other, each with a receive that waits in a kernel."""
    import gc

    import torch
    import torch.distributed as dist
    from accelerator import pretend

    pretend.defer()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    for number in range(20):
        group = pretend.native.make_group(dist.PrefixStore(str(number), store), str(number), rank, [0, 1], 10.0)
        x = torch.zeros(3, device=pretend.device(rank))
        (group.recv if rank else group.send)([x], 1 - rank, 0).wait()
        torch.accelerator.synchronize(rank)
        if rank:
            group.recv([x], 0, 0)
        del group
        gc.collect()
    dist.barrier(device_ids=[rank])
    return "went on"


def test_a_kernel_that_waits_may_outlive_its_group() -> None:
    """The thread of its stream read memory of the group that was dropped: a rank whose peer had died did so, too."""
    for outcome in on_ranks(2, drop_groups_whose_kernels_wait):
        assert outcome.value == "went on"


def test_the_watchdog_kills_a_process_whose_message_does_not_come() -> None:
    outcome = attempt(2, wait_for_a_rank_that_is_gone, "watchdog", grouped=True, timeout=1.0)[1]
    assert outcome.code == -6
    assert "watchdog: receive of 12 bytes from rank 0" in outcome.stderr


def batch_norm_in_eval_mode() -> list[float]:
    import torch
    from accelerator import pretend

    layer = torch.nn.BatchNorm1d(4).to(pretend.device(0)).eval()
    pretend.defer(lag=0.001)
    return layer(torch.ones(2, 4, device=pretend.device(0))).flatten().tolist()


def test_batch_norm_runs_behind_the_host_in_eval_mode() -> None:
    """The CPU's kernel returns no statistics there, where a device's shapes have them."""
    assert on_device(batch_norm_in_eval_mode).value == pytest.approx([1.0] * 8, abs=1e-4)
