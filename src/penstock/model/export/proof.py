"""Whether a captured graph is the model's function: run beside the model, before anything is trained with it.

Export notes what one forward did. One that would do something else the next time, or behaves in another way while it is
exported, has no graph. So the model and the stages of its graph run on the example, on it once more, and on other
values of the same shapes: same outputs to rounding, same buffers, same parameters behind each output that wants a
gradient. Nothing of that stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import ModelError, PenstockError, UsageError
from penstock.model.export.capture import Arguments, Capture, Inputs, Template, fresh, put_together, take_apart
from penstock.model.export.effects import RandomDraws, RunningModule, watched_calls
from penstock.model.export.stage_graphs import StageGraph
from penstock.model.random_states import random_state, restore_random
from penstock.model.replay.recording.undo import undone
from penstock.model.run_kind import DRY, run_as

SEED = 20
ROUNDINGS = 256  # Share of the largest entry: the same operations, but perhaps by other kernels.
RunResult = tuple[list[Any], Template, dict[str, Tensor]]  # the output's tensors and the rest of it; buffers


def prove(
    model: nn.Module, arguments: Arguments, capture: Capture, stages: Sequence[StageGraph], inputs: Inputs
) -> None:
    def plain(given: Sequence[Any]) -> RunResult:
        return _run_plain(model, lambda: arguments.call(model, inputs, [*map(fresh, given)]))

    graph = partial(_run_graph, model, capture, stages)
    try:
        first = plain(inputs.tensors)
    except PenstockError:
        raise
    except Exception as error:
        raise UsageError(
            f"example=: {type(model).__name__} cannot be run on it ({type(error).__name__}: {error}); pass the inputs "
            f"as the model takes them"
        ) from error
    _compare(model, first, plain(inputs.tensors), "twice on the same input", "its own first result")
    for _ in range(2):
        _compare(model, graph(inputs.tensors), first, "on the example", "the model")
    for other in _others(inputs.tensors):
        try:
            expected = plain(other)
        except PenstockError:
            raise
        except Exception:  # The model's own word on values that it does not take, such as positions.
            continue
        _compare(model, graph(other), expected, "on other values of the example's shapes", "the model")
        return


def runs(model: nn.Module, arguments: Arguments, inputs: Inputs) -> bool:
    """Return whether the model runs on the example as it is now; refuse clocks, and random numbers not of torch."""

    def call() -> Any:
        return arguments.call(model, inputs, [*map(fresh, inputs.tensors)])

    try:
        draws = RandomDraws(model, capture=False)
        draws.never(lambda: _run_plain(model, call, draws))
    except PenstockError:
        raise
    except Exception:  # the model's own: the example may be none for this mode, as one row for a batch norm
        return False
    return True


@contextmanager
def _seeded() -> Iterator[None]:
    """Run with gradients, of which nothing is saved, and with known random numbers."""
    before = random_state()
    try:
        torch.manual_seed(SEED)
        with torch.enable_grad(), saved_tensors_hooks(lambda _: None, _never_unpack), run_as(DRY):
            yield
    finally:
        restore_random(before)


def _never_unpack(_: Any) -> Tensor:
    raise ModelError("a forward that takes derivatives has no graph that could be checked")


def _run_plain(model: nn.Module, call: Callable[[], Any], draws: RandomDraws | None = None) -> RunResult:
    """Return what the model itself gives; nothing of the run stays in it."""
    with undone(model), _seeded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the model has to say, it says when it trains
        with watched_calls(RunningModule(model)), nullcontext() if draws is None else draws.watched():
            output = call()
        return _result(output, {name: buffer.clone() for name, buffer in model.named_buffers()})


def _run_graph(model: nn.Module, capture: Capture, stages: Sequence[StageGraph], tensors: Sequence[Any]) -> RunResult:
    """Return what the stages of its graph give, one after the other."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state |= {name: copies[id(buffer)] for name, buffer in buffers.items()}
    inputs = [*map(fresh, tensors)]
    arrived: list[dict[int, Any]] = [{} for _ in stages]  # Indexed by stage, then by producing stage.
    found: list[Any] = []
    with _seeded():
        for index, stage in enumerate(stages):
            sent, found = stage.run(state, inputs, arrived[index])
            for target, values in sent.items():
                arrived[target][index] = values
    return _result(put_together(capture.output, found), {name: state[name] for name, _ in model.named_buffers()})


def _result(output: Any, buffers: dict[str, Tensor]) -> RunResult:
    tensors: list[Any] = []
    return tensors, take_apart(output, "output", tensors), buffers


def _others(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield other inputs of the same shapes: the example's numbers in another order; then floating-point ones only."""
    chance = torch.Generator().manual_seed(SEED)

    def mixed(tensor: Tensor) -> Tensor:
        order = torch.randperm(tensor.numel(), generator=chance, device="cpu").to(tensor.device)
        moved = tensor.detach().flatten()[order].view(tensor.shape)
        if moved.is_floating_point():
            moved = moved * 0.875
        return moved.requires_grad_(tensor.requires_grad)

    yield [mixed(tensor) if isinstance(tensor, Tensor) else tensor for tensor in tensors]
    yield [mixed(tensor) if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor for tensor in tensors]


def _compare(model: nn.Module, found: RunResult, expected: RunResult, when: str, what: str) -> None:
    tensors, shape, buffers = found
    expected_tensors, expected_shape, expected_buffers = expected

    def refuse(difference: str) -> ModelError:
        return ModelError(
            f"the graph that torch.export captures of {type(model).__name__} is not the model's function: {when}, "
            f"{difference} from what {what} gives. The forward reads something that changes from call to call, or does "
            f"something else while it is captured; make that an input or a registered buffer, or pass a list of stage "
            f"modules"
        )

    if shape.key() != expected_shape.key():
        raise refuse("its output differs in its structure or in plain values")
    named = [
        (f"output tensor {place}", *pair) for place, pair in enumerate(zip(tensors, expected_tensors, strict=True))
    ]
    named += [(f"buffer {name}", buffer, expected_buffers[name]) for name, buffer in buffers.items()]
    for name, have, want in named:
        if not isinstance(want, Tensor):
            if have != want:
                raise refuse(f"{name} is {have}, which differs")
            continue
        if have.shape != want.shape or have.dtype != want.dtype or have.requires_grad != want.requires_grad:
            raise refuse(f"{name} differs in shape, type or in whether it requires grad")
        if (distance := _distance(have, want)) > 0.0:
            raise refuse(f"{name} differs by {distance:.3g} of its largest entry")
        if _leaves(have) != _leaves(want):
            raise refuse(f"{name} differs in the parameters that its gradient goes to")


def _distance(have: Tensor, want: Tensor) -> float:
    """Return the largest difference relative to the largest entry; 0 where it is rounding."""
    one, two = have.detach(), want.detach()
    if torch.equal(one, two):
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 1.0
    wide = torch.complex128 if want.is_complex() else torch.float64
    one, two = one.to(wide), two.to(wide)
    if not torch.equal(one.isfinite(), two.isfinite()):
        return float("inf")
    largest = two[two.isfinite()].abs().max().item() if two.isfinite().any() else 0.0
    apart = (one - two)[two.isfinite()].abs().max().item() if two.isfinite().any() else 0.0
    distance = apart / max(largest, 1e-30)
    return distance if distance > ROUNDINGS * torch.finfo(want.dtype).eps else 0.0


def _leaves(tensor: Tensor) -> set[int]:
    """Return the parameters that a gradient of this tensor would reach."""
    found, seen, left = set(), set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found.add(id(variable))
        left += [following for following, _ in node.next_functions]
    return found
