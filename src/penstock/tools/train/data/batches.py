"""Batches: each a pure function of (seed, step) where the source allows it, and a position that is saved.

`DataBatches` is what the loop asks: `at(step)`, validation batches, a `state_dict` that names the position. Of tokens,
batch n is the same whoever asks and whenever, so going on after a stop needs nothing but n. Of a function of the
user's, the same holds when it returns an object with `batch(number)`; a plain iterable is counted through to where it
was, unless it has a `state_dict` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.generators import restore_generators, states_of_generators
from penstock.errors import ModelError, UsageError
from penstock.runtime.state.randomness import seed_of
from penstock.tools.train.config.paths import ROWS, holds_rows
from penstock.tools.train.config.settings import Data, TrainConfig
from penstock.tools.train.config.source import call_source, is_function
from penstock.tools.train.data.batch import DataBatch, DataBatches
from penstock.tools.train.data.row_batches import open_row_batches
from penstock.tools.train.data.tokenizer import open_tokenizer
from penstock.tools.train.data.tokens import Tokens, read_tokens

TRAINING, VALIDATION = 0, 1  # streams of random places


class TokenBatches:
    """Rows of tokens from random places, drawn from (seed, number); the target is the row one token further."""

    def __init__(self, tokens: Tokens, rows: int, sequence: int, seed: int, held_back: float) -> None:
        self.words = tokens.words
        self.rows, self.sequence, self.longest, self.seed = rows, sequence, sequence, seed
        cut = len(tokens) - int(len(tokens) * held_back)
        self._training, self._validation = tokens.part(0, cut), tokens.part(cut, len(tokens))
        self._fingerprint = tokens.fingerprint
        self._next = 0
        self.changed = ""  # Tells the user how the tokens differ from those of the checkpoint.
        if len(self._training) <= sequence:
            raise UsageError(
                f"{tokens.words}: {len(self._training)} of them to train on, and one row takes {sequence + 1} "
                f"(data.sequence and one to predict); give more text, or a shorter data.sequence"
            )

    def first(self) -> DataBatch:
        return self._rows(self._training, 0, TRAINING)

    def at(self, number: int) -> DataBatch:
        self._next = number + 1
        return self._rows(self._training, number, TRAINING)

    def validation(self, number: int) -> DataBatch | None:
        """Return the same batches at every evaluation."""
        if len(self._validation) <= self.sequence:
            return None
        return self._rows(self._validation, number, VALIDATION)

    def _rows(self, tokens: Tokens, number: int, stream: int) -> DataBatch:
        generator = torch.Generator().manual_seed(seed_of(self.seed, number, 0, stream))
        places = torch.randint(len(tokens) - self.sequence, (self.rows,), generator=generator, device="cpu").tolist()
        rows = torch.stack([tokens.values[place : place + self.sequence + 1] for place in places]).to(torch.int64)
        return DataBatch((rows[:, :-1],), {}, rows[:, 1:], self.rows * self.sequence)

    def state_dict(self) -> dict[str, Any]:
        """Return the next pass, and which tokens it is of."""
        return {"next": self._next, "seed": self.seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the position. Batches do not depend on the past: only what they are drawn from has to be the same."""
        self._next = int(state["next"])
        if state["fingerprint"] != self._fingerprint:
            self.changed = "the tokens are not those of the checkpoint (other files or another Python)"


class FunctionBatches:
    """An object of the user's with `batch(number)`, and `validation(number)` if it likes."""

    def __init__(self, source: Any, words: str) -> None:
        self._source = source
        self.words = words
        self._next = 0

    def first(self) -> DataBatch:
        return as_batch(self._source.batch(0), self.words)

    def at(self, number: int) -> DataBatch:
        self._next = number + 1
        return as_batch(self._source.batch(number), self.words)

    def validation(self, number: int) -> DataBatch | None:
        ask = getattr(self._source, "validation", None)
        found = None if ask is None else ask(number)
        return None if found is None else as_batch(found, self.words)

    def state_dict(self) -> dict[str, Any]:
        """Return the next pass, and the object's own state if it has one."""
        own = getattr(self._source, "state_dict", None)
        return {"next": self._next, "own": None if own is None else own()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = int(state["next"])
        if state["own"] is not None:
            self._source.load_state_dict(state["own"])


class IterableBatches:
    """An iterable of the user's, begun again at its end; what was taken is counted."""

    def __init__(self, source: Any, words: str) -> None:
        self._source = source
        self.words = words
        self._iterator: Iterator[Any] | None = None
        self._taken = 0  # Batches of all rounds.
        self._inside = 0  # Batches of this round.
        self._begun: dict[str, Any] | None = None  # the random generators, where this round began

    def _begin(self) -> Iterator[Any]:
        """Begin a new round. What it shuffles by is noted, so that the round can be begun again in the same order."""
        own = [generator.get_state() for generator in _generators_of(self._source)]
        self._begun = {"all": states_of_generators(), "own": own}
        return iter(self._source)

    def first(self) -> DataBatch:
        """Return a batch to look at, and put it back."""
        if self._iterator is None:
            self._iterator = self._begin()
        found = next(self._iterator, None)
        if found is None:
            raise UsageError(f"{self.words} has no batches")
        self._iterator = chain([found], self._iterator)
        return as_batch(found, self.words)

    def at(self, number: int) -> DataBatch:
        """Return the next batch: `number` must be the count of those before it."""
        if number != self._taken:
            raise ModelError(f"{self.words}: batch {number} was asked for, batch {self._taken} is next")
        if self._iterator is None:
            self._iterator = self._begin()
        try:
            found = next(self._iterator)
        except StopIteration:
            if not self._inside:
                again = "; return one that can be iterated again" if number else ""
                raise UsageError(f"{self.words} has no batches{' left' if number else ''}{again}") from None
            self._iterator, self._inside = None, 0
            return self.at(number)
        self._taken += 1
        self._inside += 1
        return as_batch(found, self.words)

    def validation(self, number: int) -> DataBatch | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return how many were taken, and the iterable's own state if it has one."""
        own = getattr(self._source, "state_dict", None)
        position = {"taken": self._taken, "inside": self._inside}
        return {**position, "own": None, "begun": self._begun} if own is None else {**position, "own": own()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position by the iterable's own state, or by counting through to where it was."""
        self._taken, self._inside = int(state["taken"]), int(state["inside"])
        if state["own"] is not None:
            self._source.load_state_dict(state["own"])
            self._iterator = None
            return
        if self._iterator is None or not hasattr(self._source, "__next__"):
            if state["begun"] is not None:  # the order of this round; the checkpoint then puts the generators back
                restore_generators(state["begun"]["all"])
                for generator, value in zip(_generators_of(self._source), state["begun"]["own"], strict=True):
                    generator.set_state(value)
            self._iterator = self._begin()
        passed = sum(1 for _ in islice(self._iterator, self._inside))
        if passed < self._inside:
            raise ModelError(f"{self.words}: {self._inside} batches had been taken, now it has only {passed}")


def _generators_of(source: Any) -> list[torch.Generator]:
    """Find the generators that a DataLoader or its samplers shuffle by."""
    holders = (source, getattr(source, "sampler", None), getattr(source, "batch_sampler", None))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def as_batch(found: Any, origin: str) -> DataBatch:
    """Read what a user's function returned: (inputs, target); inputs a tensor, a tuple, or a dict of keywords."""
    if isinstance(found, dict):  # a model that takes its labels itself
        return DataBatch((), dict(found), None, _count(found.values()))
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise UsageError(
            f"{origin} gave a {type(found).__name__} for a batch; give (inputs, target), where inputs are a tensor, a "
            f"tuple or a dict of keyword arguments; or one dict with everything the model takes"
        )
    inputs, target = found
    if isinstance(inputs, dict):
        return DataBatch((), dict(inputs), target, _count(inputs.values()))
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    return DataBatch(args, {}, target, _count(args))


def _count(values: Any) -> int:
    first = next((value for value in values if isinstance(value, Tensor) and value.dim()), None)
    if first is None:
        return 1
    return first.numel() if not first.is_floating_point() and first.dim() == 2 else first.shape[0]


def _refuse_row_keys(data: Data) -> None:
    """Refuse a key that only rows have: it would be ignored silently."""
    standard = Data()
    for name in ("format", "columns", "packing", "max_tokens", "streaming", "validation_source"):
        if getattr(data, name) != getattr(standard, name):
            raise UsageError(
                f"data.{name} is for rows, and data.source has none; rows are in files that end in {', '.join(ROWS)}, "
                f"in a folder that save_to_disk has written, or returned by a module:function with data.format set"
            )


def open_data(config: TrainConfig) -> DataBatches:
    """Open what a configuration trains on."""
    data = config.data
    if holds_rows(data):
        return open_row_batches(config)
    _refuse_row_keys(data)
    if isinstance(data.source, str) and is_function(data.source):
        source = call_source("data.source", data.source, data.options)
        if hasattr(source, "batch"):
            return FunctionBatches(source, data.source)
        if not hasattr(source, "__iter__"):
            raise UsageError(
                f"data.source: {data.source} returned a {type(source).__name__}; return an iterable of batches, or an "
                f"object with batch(number)"
            )
        return IterableBatches(source, data.source)
    if data.options:
        raise UsageError("data.options are for a module:function; files and stdlib take none")
    rows = data.batch // config.training.accumulate
    tokenizer = open_tokenizer(data.tokenizer, data.end) if data.tokenizer else None
    tokens = read_tokens(data.source, data.tokens, tokenizer)
    return TokenBatches(tokens, rows, data.sequence, config.seed, data.validation)


def check_validation(config: TrainConfig, data: DataBatches) -> None:
    """Raise UsageError where evaluations are to end a run, and there is nothing to evaluate with."""
    if config.evaluation.patience is not None and data.validation(0) is None:
        raise UsageError(
            f"evaluation.patience is {config.evaluation.patience}, and there is not one row to evaluate with: "
            f"data.validation is {config.data.validation:g}, data.sequence {config.data.sequence} ({data.words}). Give "
            f"more data, a larger data.validation or, for rows, data.validation_source (a module:function gives "
            f"batches by validation(number)), or leave evaluation.patience out"
        )
