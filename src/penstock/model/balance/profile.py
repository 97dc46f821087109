"""What the pieces of a model weigh: parameters, time, memory, or what the user says.

A piece is a layer of an `nn.Sequential`, or a unit call of a replay recording. Parameters are read off; time and memory
are measured (`measure`). Ranks must cut alike, but each would measure other times: `agree` is given this rank's numbers
and answers with the first rank's. Ranks that need not measure pass `measured=False`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ModelError, UsageError
from penstock.model.balance.measure import REPEATS, ROUNDS, Measured, measure
from penstock.model.declared_skips import use_skips
from penstock.model.names import dotted_name, similar_names
from penstock.model.replay.recording.unit_calls import ForwardRecording

OPTIMIZERS = {"sgd": 0, "sgd-momentum": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}  # states per parameter
WAYS = ("parameters", "time", "memory")
Agree = Callable[[list[float]], list[float]]


@dataclass(frozen=True)
class Weight:
    """One piece. A parameter that several pieces share counts in the first of them."""

    name: str
    parameters: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0  # Bytes of those that are trained.
    optimizer_bytes: int = 0
    milliseconds: float = 0.0  # forward and backward of one microbatch; 0 where it was not measured
    activation_bytes: int = 0  # kept for the backward of one microbatch, beside what earlier pieces keep
    output_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """The memory of the piece with no microbatch in flight."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def profile_layers(
    layers: Sequence[tuple[str, nn.Module]],
    example: Sequence[Any] | None = None,
    *,
    optimizer: str = "adamw",
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
    measured: bool = True,
    agree: Agree | None = None,
    device: torch.device | None = None,
) -> list[Weight]:
    """Weigh the layers of an `nn.Sequential`, each called on what the one before returned.

    Without an example there are parameters only. The example should have the size of a microbatch.
    """
    weights = _at_rest(layers, optimizer)
    if example is not None and measured:
        _check_real(layers)
        numbers = {f"{number}": layer for number, (_, layer) in enumerate(layers)}
        first: dict[int, str] = {}  # a layer that stands there twice has one forward
        order = [first.setdefault(id(layer), number) for number, layer in numbers.items()]

        def run() -> None:
            values: Any = tuple(example)
            with use_skips({}):
                for number, (_, layer) in enumerate(layers):
                    values = layer(*values) if number == 0 else layer(values)

        found = measure(nn.ModuleList(numbers.values()), numbers, order, run, rounds, repeats, device)
        weights = _joined(weights, found)
    return agreed(weights, agree)


def profile_calls(
    model: nn.Module,
    recording: ForwardRecording,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    optimizer: str = "adamw",
    rounds: int = ROUNDS,
    repeats: int = REPEATS,
    measured: bool = True,
    agree: Agree | None = None,
    device: torch.device | None = None,
) -> list[Weight]:
    """Weigh the calls of a recording; those of the glue, which every stage makes, weigh nothing.

    `measured=False` only reads parameters off.
    """
    modules = dict(model.named_modules())
    order = [call.unit for call in recording.calls]
    weights = _at_rest([(name, modules[name]) for name in order], optimizer)
    if measured:
        _check_real([("", model)])
        found = measure(model, modules, order, lambda: model(*args, **kwargs), rounds, repeats, device)
        weights = _joined(weights, found)
    weights = [
        Weight(weight.name) if call.glue else weight for weight, call in zip(weights, recording.calls, strict=True)
    ]
    return agreed(weights, agree)


def _at_rest(pieces: Sequence[tuple[str, nn.Module]], optimizer: str) -> list[Weight]:
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer={optimizer!r}: choose one of {', '.join(map(repr, OPTIMIZERS))}")
    seen: set[int] = set()
    found = []
    for name, module in pieces:
        fresh = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, fresh))
        trained = sum(_bytes(parameter) for parameter in fresh if parameter.requires_grad)
        found.append(
            Weight(
                name,
                parameters=sum(parameter.numel() for parameter in fresh),
                parameter_bytes=sum(map(_bytes, fresh)),
                gradient_bytes=trained,
                optimizer_bytes=trained * OPTIMIZERS[optimizer],
            )
        )
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _check_real(pieces: Sequence[tuple[str, nn.Module]]) -> None:
    for name, module in pieces:
        for inner, parameter in module.named_parameters():
            if parameter.is_meta:
                raise ModelError(
                    f"{dotted_name(name, inner)} is on the meta device, where nothing can be measured; pass "
                    f"balance='parameters', counts or weights by name"
                )


def _joined(weights: Sequence[Weight], found: Sequence[Measured]) -> list[Weight]:
    return [
        replace(
            weight,
            milliseconds=piece.seconds * 1e3,
            activation_bytes=piece.saved,
            output_bytes=piece.output,
        )
        for weight, piece in zip(weights, found, strict=True)
    ]


def agreed(weights: list[Weight], agree: Agree | None) -> list[Weight]:
    if agree is None:
        return weights
    names = [field.name for field in fields(Weight) if field.name != "name"]
    flat = agree([float(getattr(weight, name)) for weight in weights for name in names])
    if len(flat) != len(weights) * len(names):
        raise ModelError(
            f"this rank has {len(weights)} pieces of the model, the first rank {len(flat) / len(names):g}; build the "
            f"same model on every rank"
        )
    return [
        Weight(
            weight.name,
            **{
                name: value if name == "milliseconds" else round(value)  # type: ignore[arg-type]
                for name, value in zip(names, flat[number * len(names) :], strict=False)
            },
        )
        for number, weight in enumerate(weights)
    ]


# -- one number per piece


def piece_weights(
    balance: str | Mapping[str, float], weights: Sequence[Weight], in_flight: Sequence[int] = ()
) -> list[float] | list[list[float]]:
    """Return what `partition` takes, for `balance="parameters" | "time" | "memory"` or a mapping of names to weights.

    With the microbatches in flight of each stage (`balance.in_flight`), memory is a row for each stage.
    """
    if isinstance(balance, Mapping):
        return weights_by_name(balance, weights)
    if balance == "parameters":
        return [float(weight.parameters) for weight in weights]
    if balance == "memory":
        return memory_rows(weights, in_flight) if in_flight else memory_rows(weights, [1])[0]
    if balance == "time":
        if not any(weight.milliseconds for weight in weights):
            raise UsageError("balance='time' measures the pieces with an example; pass example=(x,)")
        return [weight.milliseconds for weight in weights]
    raise UsageError(f"balance={balance!r}: choose one of {', '.join(map(repr, WAYS))}, counts or {{name: weight}}")


def memory_rows(weights: Sequence[Weight], in_flight: Sequence[int]) -> list[list[float]]:
    """Return the memory that each piece would take on each stage: early stages hold more microbatches."""
    rows = {
        held: [float(weight.state_bytes + held * weight.activation_bytes) for weight in weights]
        for held in set(in_flight)
    }
    return [rows[held] for held in in_flight]


def crossing_of(weights: Sequence[Weight]) -> list[float]:
    """Return the bytes that cross a cut before each piece, where a piece reads only what the one before it returned."""
    return [0.0, *(float(weight.output_bytes) for weight in weights[:-1])]


def weights_by_name(named: Mapping[str, float], weights: Sequence[Weight]) -> list[float]:
    """Read `{"embed": 2, "layers.*": 1}`: a name itself, one that it lies in, else the longest pattern that fits.

    Pieces without parameters may be left out and then weigh nothing; with them, that is an error.
    """
    names = [weight.name for weight in weights]
    for given in named:
        if not any(_fits(given, name) for name in names):
            raise ModelError(
                f"balance: {given!r} names no piece of the model{similar_names(given, names, 'there are')}"
            )
    found, missing = [], []
    for weight in weights:
        fitting = [given for given in named if _fits(given, weight.name)]
        if not fitting and weight.parameters:
            missing.append(weight.name)
        best = max(fitting, key=lambda given: (given == weight.name, len(given.replace("*", ""))), default=None)
        found.append(0.0 if best is None else float(named[best]))
    if missing:
        raise ModelError(
            f"balance has no weight for {', '.join(dict.fromkeys(missing))}; add them, or '*': 1 for the rest"
        )
    return found


def _fits(given: str, name: str) -> bool:
    return given == name or name.startswith(f"{given}.") or fnmatchcase(name, given)
