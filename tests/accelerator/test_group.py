"""The process group has NCCL's rules: what they forbid is found, and what they allow runs without a race."""

from __future__ import annotations

from typing import Any

import pytest
from accelerator.harness import NAMES, attempt, on_ranks, order_conflicts
from tiers import mostly_slow


def filled(value: float, count: int = 4) -> Any:
    import torch
    import torch.distributed as dist
    from accelerator import pretend

    return torch.full((count,), float(value), device=pretend.device(dist.get_rank()))


def messages_in_order() -> list[float]:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.send(filled(1), 1)
        dist.send(filled(2), 1)
        back = filled(0)
        dist.recv(back, 1)
        return back.tolist()
    first, second = filled(0), filled(0)
    for work in [dist.irecv(first, 0), dist.irecv(second, 0)]:
        work.wait()
    dist.send(first + second * 10, 0)
    return []


def a_batch_in_both_directions() -> list[float]:
    import torch.distributed as dist

    rank = dist.get_rank()
    here = filled(-1)
    batch = [dist.P2POp(dist.isend, filled(rank), 1 - rank), dist.P2POp(dist.irecv, here, 1 - rank)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return here.tolist()


def every_collective() -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    found["sum"] = filled(rank + 1)
    dist.all_reduce(found["sum"])
    found["mean"] = filled(rank + 1)
    dist.all_reduce(found["mean"], op=dist.ReduceOp.AVG)
    found["largest"] = filled(rank + 1)
    dist.all_reduce(found["largest"], op=dist.ReduceOp.MAX)
    found["from 1"] = filled(rank)
    dist.broadcast(found["from 1"], 1)
    found["to 1"] = filled(rank + 1)
    dist.reduce(found["to 1"], 1)
    parts = [filled(0) for _ in range(size)]
    dist.all_gather(parts, filled(rank))
    found["gathered"] = torch.cat(parts)
    found["gathered into one"] = filled(0, 4 * size)
    dist.all_gather_into_tensor(found["gathered into one"], filled(rank))
    found["scattered"] = filled(0, 2)
    dist.reduce_scatter_tensor(found["scattered"], torch.arange(2.0 * size, device=found["sum"].device) + rank)
    found["exchanged"] = filled(0, size)
    dist.all_to_all_single(found["exchanged"], torch.arange(float(size), device=found["sum"].device) + 10 * rank)
    dist.barrier()
    on_host = torch.ones(2)
    dist.all_reduce(on_host)  # by gloo
    found["on the host"] = on_host
    return {name: each.tolist() for name, each in found.items()}


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_messages_meet_in_the_order_of_their_calls(name: str, eager: bool) -> None:
    outcomes = on_ranks(2, messages_in_order, name=name, eager=eager)
    assert outcomes[0].value == [21.0] * 4
    assert [each.races for each in outcomes] == [[], []]


def test_a_batch_in_both_directions_ends() -> None:
    outcomes = on_ranks(2, a_batch_in_both_directions)
    assert [each.value for each in outcomes] == [[1.0] * 4, [0.0] * 4]
    assert [each.races for each in outcomes] == [[], []]


def test_collectives_of_three_ranks() -> None:
    outcomes = on_ranks(3, every_collective)
    for rank, each in enumerate(outcomes):
        assert each.races == []
        value = each.value
        assert value["sum"] == [6.0] * 4
        assert value["mean"] == [2.0] * 4
        assert value["largest"] == [3.0] * 4
        assert value["from 1"] == [1.0] * 4
        assert value["to 1"] == [6.0 if rank == 1 else rank + 1.0] * 4
        assert value["gathered"] == value["gathered into one"] == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
        assert value["scattered"] == [3.0 * (2 * rank) + 3, 3.0 * (2 * rank + 1) + 3]
        assert value["exchanged"] == [rank, rank + 10.0, rank + 20.0]
        assert value["on the host"] == [3.0, 3.0]


# ---------------------------------------------------------------- what NCCL forbids
SOON = {"PRETEND_PATIENCE": "0.3"}  # where a deadlock is what is expected


def both_receive_first() -> None:
    import torch.distributed as dist

    here = filled(0)
    other = 1 - dist.get_rank()
    works = [dist.irecv(here, other), dist.isend(filled(1), other)]
    for work in works:
        work.wait()


def three_in_a_ring() -> None:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    for pair in [(0, 1), (1, 2), (2, 0)]:  # connect all, as no deadlock is in that
        if rank == pair[0]:
            dist.send(filled(0), pair[1])
        elif rank == pair[1]:
            dist.recv(filled(0), pair[0])
    here = filled(0)
    dist.recv(here, (rank - 1) % size)  # everybody waits for the one before, and sends afterwards
    dist.send(here, (rank + 1) % size)


def first_uses_in_a_ring() -> None:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.isend(filled(0), (rank + 1) % size)


def sizes_differ() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.send(filled(1, 4), 1)
    else:
        dist.recv(filled(0, 3), 0)


def collectives_differ() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.all_reduce(filled(1))
    else:
        dist.broadcast(filled(1), 1)


def test_both_that_receive_first_are_a_deadlock_that_names_its_cycle() -> None:
    for rank, each in enumerate(attempt(2, both_receive_first, grouped=True, environment=SOON)):
        assert "NCCL would hang" in each.error
        assert f"rank {rank}'s receive of 16 bytes from rank {1 - rank}" in each.error
        assert f"stands behind rank {rank}'s receive" in each.error
        queue = f"rank {rank}, communicator 0/0:1: receive of 16 bytes from rank {1 - rank}, then send of 16 bytes"
        assert queue in each.error


def test_three_hosts_that_wait_in_a_ring_are_a_deadlock() -> None:
    for each in attempt(3, three_in_a_ring, grouped=True, environment=SOON):
        assert "NCCL would hang" in each.error
        assert "host, which waits for" in each.error


def test_a_pair_made_at_its_first_use_blocks_both_hosts() -> None:
    """Each of three ranks makes a communicator with the next one first: all wait for hosts that make another one."""
    for each in attempt(3, first_uses_in_a_ring, grouped=True, environment=SOON):
        assert "making of the communicator" in each.error


def test_sizes_that_differ_are_told_on_both_sides() -> None:
    sender, receiver = attempt(2, sizes_differ, grouped=True)
    assert "rank 0 sends 16 bytes on communicator 0/0:1 where rank 1 receives 12" in sender.error
    assert "rank 1 receives 12 bytes on communicator 0/0:1 where rank 0 sends 16" in receiver.error


def two_messages(swapped: bool, second: int) -> list[list[float]]:
    """Send two messages of 4 numbers and of `second`; the mutant sends them in the other order."""
    import torch.distributed as dist

    sizes = [4, second]
    if dist.get_rank() == 0:
        for place in (1, 0) if swapped else (0, 1):
            dist.send(filled(place, sizes[place]), 1)
        return []
    both = [filled(-1, size) for size in sizes]
    for each in both:
        dist.recv(each, 0)
    return [each.tolist() for each in both]


def test_sends_that_are_swapped_are_found_by_their_sizes_and_else_arrive_swapped() -> None:
    """As with NCCL, which has no tags: only their values show that two messages of one size were swapped."""
    assert on_ranks(2, two_messages, False, 3)[1].value == [[0.0] * 4, [1.0] * 3]
    assert (
        "receives 16 bytes on communicator 0/0:1 where rank 0 sends 12"
        in attempt(2, two_messages, True, 3, grouped=True)[1].error
    )
    assert on_ranks(2, two_messages, True, 4)[1].value == [[1.0] * 4, [0.0] * 4]


def test_collectives_that_differ_are_told() -> None:
    outcomes = attempt(2, collectives_differ, grouped=True)
    assert "rank 0 runs all_reduce on communicator 0/all where rank 1 runs broadcast" in outcomes[0].error


def messages(mutant: str) -> list[float]:
    """Send a message and use it; each mutant leaves something out."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        here = filled(1)
        work = dist.isend(here, 1)
        if mutant != "the sender does not wait":
            work.wait()
        here.add_(1)  # the next step's values
        work.wait()
        return []
    here = filled(0)
    work = dist.irecv(here, 0)
    if mutant != "the receiver does not wait":
        work.wait()
    value = here + 1
    work.wait()
    return value.tolist()


def test_a_message_that_is_waited_for_is_no_race() -> None:
    outcomes = on_ranks(2, messages, "none")
    assert outcomes[1].value == [2.0] * 4
    assert [each.races for each in outcomes] == [[], []]


@pytest.mark.parametrize("rank", [0, 1], ids=["sender", "receiver"])
def test_a_wait_for_a_message_that_is_left_out_is_a_race(rank: int) -> None:
    outcomes = on_ranks(2, messages, f"the {['sender', 'receiver'][rank]} does not wait")
    assert outcomes[1 - rank].races == []
    assert any("does not follow" in race and "a communication that" in race for race in outcomes[rank].races)


def two_communicators(waiting: bool, turned: bool) -> list[float]:
    """Reduce on two groups of the same ranks; `turned`: rank 1 launches the second one first."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for each in groups:
        dist.all_reduce(filled(0), group=each)  # in one order: to make a communicator, both hosts have to come
    values = [filled(dist.get_rank()), filled(10 * dist.get_rank())]
    works = []
    for place in (1, 0) if turned and dist.get_rank() else (0, 1):
        works.append(dist.all_reduce(values[place], group=groups[place], async_op=True))
        if waiting:
            works[-1].wait()
    for work in works:
        work.wait()
    return [float(each.sum()) for each in values]


@pytest.mark.parametrize(
    ("waiting", "turned", "conflicts"), [(False, False, 0), (False, True, 1), (True, False, 0)], ids=str
)
def test_collectives_that_are_launched_in_other_orders_are_found(waiting: bool, turned: bool, conflicts: int) -> None:
    """They end here, where kernels never lack room; on a device two of them can each hold what the other needs."""
    outcomes = on_ranks(2, two_communicators, waiting, turned)
    assert [each.value for each in outcomes] == [[4.0, 40.0]] * 2
    assert len(order_conflicts(outcomes)) == conflicts


def reduce_on_one_device() -> None:
    import torch
    import torch.distributed as dist
    from accelerator import pretend

    torch.accelerator.set_device_index(0)
    dist.all_reduce(torch.ones(4, device=pretend.device(0)))


def test_two_ranks_on_one_device_are_refused() -> None:
    for outcome in attempt(2, reduce_on_one_device, grouped=True):
        assert "Duplicate GPU detected" in outcome.error
