"""Chunk specs of `torch.distributed.pipelining`: how arguments are cut into microbatches, and outputs joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.pipelining.microbatch as their_microbatch

import penstock.compat.pipelining as ours
from penstock.compat.pipelining import microbatch
from penstock.errors import ModelError, UsageError


def test_chunks_are_cut_and_joined_as_specs_say() -> None:
    x, y = torch.arange(12.0).view(2, 6), torch.arange(6)
    spec: Any = ours.TensorChunkSpec.from_tuple((1, 0))
    args, kwargs = microbatch.split_args_kwargs_into_chunks((x, y), {"scale": 3}, 4, spec)
    assert [part[0].shape[1] for part in args] == [2, 2, 1, 1]  # exactly 4, where torch's split of 6 rows also is
    assert kwargs == [{"scale": 3}] * 4
    torch.testing.assert_close(microbatch.merge_chunks([part[0] for part in args], ours.TensorChunkSpec(1)), x)
    theirs_too = (their_microbatch.TensorChunkSpec(1), their_microbatch._Replicate())
    args, _ = microbatch.split_args_kwargs_into_chunks((x, y), None, 2, theirs_too)
    assert args[0][1] is not None
    assert [part[1].shape[0] for part in args] == [6, 6]
    many, _ = microbatch.split_args_kwargs_into_chunks((torch.ones(4, 2), torch.ones(8, 2)), {}, 2)
    assert [tuple(map(len, part)) for part in many] == [(2, 4), (2, 4)]
    nested, _ = microbatch.split_args_kwargs_into_chunks(((torch.ones(4), [torch.ones(8)]),), {}, 2)
    assert [(len(part[0][0]), len(part[0][1][0])) for part in nested] == [(2, 4), (2, 4)]
    named = microbatch.merge_chunks([{"a": x, "n": 1}, {"a": x, "n": 1}], {"a": ours.TensorChunkSpec(0), "n": None})
    assert named["a"].shape == (4, 6)
    assert named["n"] == 1
    with pytest.raises(ModelError, match="differs between microbatches"):
        microbatch.merge_chunks([1, 2], (None,))
    with pytest.raises(ModelError, match="has 2 values, but output_merge_spec has 1"):
        microbatch.merge_chunks([(x, x)], (ours.TensorChunkSpec(0),))
    with pytest.raises(UsageError, match="no outputs to merge"):
        microbatch.merge_chunks([])
    with pytest.raises(UsageError, match="args_chunk_spec has 2 entries for 1"):
        microbatch.split_args_kwargs_into_chunks((x,), None, 2, spec)
    with pytest.raises(UsageError, match="kwargs_chunk_spec names"):
        microbatch.split_args_kwargs_into_chunks((), {"a": x}, 2, None, {"b": ours.TensorChunkSpec(0)})
    assert str(ours.TensorChunkSpec(1)) == "TensorChunkSpec(1)"
