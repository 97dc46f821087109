"""The state of a whole model, as its library has saved it, into the stages of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.pipeline import Pipeline

__all__ = ["Misfits", "load_own"]


class Misfits(NamedTuple):
    """As torch's own `load_state_dict` returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_own(pipe: Pipeline, state: Mapping[str, Any]) -> Misfits:
    """Load what the stages of this process hold; what `state` lacks stays as it was, and is told.

    A tied weight may be there under any of its names.
    """
    first = pipe.state.first_names()
    known = {first.get(name, name): value for name, value in state.items()}
    own = pipe.state_dict()
    every = {name for holding in pipe.deployment.staged.holdings() for name in holding.names.values()}
    every |= {first.get(name, name) for name in every}
    pipe.load_state_dict({name: known.get(first.get(name, name), value) for name, value in own.items()})
    missing = [name for name in own if first.get(name, name) not in known]
    return Misfits(missing, [name for name in state if name not in every])
