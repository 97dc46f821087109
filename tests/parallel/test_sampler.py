"""Each replica's rows: all of them are seen once an epoch, none twice, and all replicas take the same steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import penstock
from penstock.errors import UsageError

COUNTS = st.integers(1, 6)


@given(rows=st.integers(0, 60), replicas=COUNTS, more=st.integers(0, 9), shuffle=st.booleans(), drop=st.booleans())
def test_every_row_is_seen_once_and_batches_are_even(
    rows: int, replicas: int, more: int, shuffle: bool, drop: bool
) -> None:
    batch = replicas + more
    samplers = [
        penstock.ReplicaSampler(
            range(rows), batch, shuffle=shuffle, seed=3, drop_last=drop, replica=replica, replicas=replicas
        )
        for replica in range(replicas)
    ]
    steps = list(zip(*samplers, strict=True))
    assert {len(sampler) for sampler in samplers} == {len(steps)}
    seen = [row for step in steps for part in step for row in part]
    assert len(seen) == len(set(seen))
    left_out = rows - len(seen)
    assert left_out < (batch if drop else replicas)
    for step in steps:
        sizes = [len(part) for part in step]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == batch or step is steps[-1]
    if not shuffle:
        assert seen == sorted(seen)


def test_epochs_differ_and_replicas_agree_on_them() -> None:
    first, second = (
        penstock.ReplicaSampler(range(20), 10, shuffle=True, replica=replica, replicas=2) for replica in (0, 1)
    )
    before = [*first, *second]
    for sampler in (first, second):
        sampler.set_epoch(1)
    after = [*first, *second]
    assert before != after
    assert sorted(row for part in after for row in part) == list(range(20))


def test_a_last_batch_that_a_pipeline_could_not_cut_is_left_out() -> None:
    sampler = penstock.ReplicaSampler(range(21), 8, least=4, replica=1, replicas=2)
    assert list(sampler) == [[4, 5, 6, 7], [12, 13, 14, 15]]  # 5 rows are left: fewer than 4 for each


def test_it_feeds_a_data_loader() -> None:
    loader = DataLoader(list(range(10)), batch_sampler=penstock.ReplicaSampler(range(10), 4, replica=1, replicas=2))
    assert [part.tolist() for part in loader] == [[2, 3], [6, 7], [9]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 1, "replicas": 2, "replica": 0}, "at least 2"),
        ({"batch": 8, "replicas": 2, "replica": 2}, "replica=2: there are 2"),
        ({"batch": 8, "replicas": 2, "replica": 0, "least": 5}, "at least 10"),
    ],
)
def test_wrong_numbers(options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        penstock.ReplicaSampler(range(10), **options)  # type: ignore[arg-type]
