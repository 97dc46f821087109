"""The state of schedulers, scalers, data and random generators, in a checkpoint: see `plain`."""

from __future__ import annotations

from penstock.messages.plain import TENSOR, decode, encode, same

__all__ = ["TENSOR", "decode", "encode", "same"]
