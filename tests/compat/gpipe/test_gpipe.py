"""GPipe as a module among modules: named, moved, saved, copied, nested, and clear about what is wrong."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from compat.gpipe.plain import assert_gradients_of_its_module, assert_same_gradients, chunked, layers, rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import FallbackWarning, UsageError


def test_names_and_state_are_the_models_own() -> None:
    """Keys had the number of the partition in them."""
    names = OrderedDict(embed=nn.Linear(8, 8), norm=nn.BatchNorm1d(8), head=nn.Linear(8, 2))
    model = nn.Sequential(names)
    before = model.state_dict()
    pipe = penstock.GPipe(model, balance=[1, 2], chunks=2)
    assert list(pipe.state_dict()) == list(before)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in pipe.named_buffers()] == [name for name, _ in model.named_buffers()]
    other = penstock.GPipe(nn.Sequential(copy.deepcopy(names)), balance=[2, 1])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert str(other.load_state_dict(before)) == "<All keys matched successfully>"
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(rows()), model.eval()(rows()))


def test_layers_are_counted_indexed_and_iterated() -> None:
    model = layers()
    pipe = penstock.GPipe(model, balance=[4, 2])
    assert len(pipe) == 6
    assert list(pipe) == list(model)
    assert pipe[0] is model[0]
    assert pipe[-1] is model[5]
    assert list(pipe[1:3]) == list(model)[1:3]
    with pytest.raises(IndexError):
        pipe[6]
    assert pipe.module is model
    assert "balance=[4, 2], chunks=8, checkpoint='except_last'" in repr(pipe)


def test_modes_reach_all_layers_and_eval_and_no_grad_just_work() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.BatchNorm1d(8), nn.Linear(8, 8))
    pipe, x = penstock.GPipe(model, balance=[2, 2], chunks=4), rows()
    pipe.eval()
    assert not any(module.training for module in model.modules())
    before = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(pipe(x), model(x))
    assert pipe(x).requires_grad
    pipe(x).sum().backward()
    with torch.no_grad():
        assert not pipe(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(pipe(x), model(x))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    pipe.train()
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        pipe(x)
    assert model[2].num_batches_tracked == 4  # one per microbatch, unless deferred_batch_norm


class Net(nn.Module):
    """No Sequential, with a skip past the middle, and a mode that its own code reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8)
        self.balance = nn.Linear(8, 8)  # a name that GPipe has too

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        skip = torch.tanh(self.down(x))
        y = torch.tanh(self.middle(skip))
        y = self.balance(torch.tanh(self.up(y + skip)))
        y = y if scale is None else y * scale
        return y if self.training else 2 * y


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_any_module_is_cut_with_its_first_batch(checkpoint: str) -> None:
    """The forward of a model that is no Sequential was lost; long skips could not pass."""
    plain, pipe = Net(), penstock.GPipe(Net(), stages=3, chunks=4, checkpoint=checkpoint)
    assert pipe.balance is None
    assert list(pipe.state_dict()) == list(plain.state_dict())
    x, other = rows(requires_grad=True), rows(requires_grad=True)
    for _ in range(2):
        pipe(x).sum().backward()
        chunked(plain, other, 4).sum().backward()
        assert_same_gradients(pipe, plain)
        assert x.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(x.grad, other.grad)  # two stages have a part in it
    assert len(pipe.balance or ()) == 3
    assert pipe._calls is not None
    assert pipe._calls.split.stages == 3
    torch.testing.assert_close(pipe.eval()(x), plain.eval()(x))


def test_arguments_by_name_reach_their_stage_with_gradients() -> None:
    pipe, scale = penstock.GPipe(Net(), stages=2, chunks=3), torch.ones(8, 1, requires_grad=True)
    pipe(rows(), scale=scale).sum().backward()
    have, scale.grad = scale.grad, None
    pipe.module(rows(), scale).sum().backward()
    torch.testing.assert_close(have, scale.grad)
    with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
        penstock.GPipe(layers(), balance=2)(rows(), mask=None)


def test_a_part_in_another_mode_stays_in_it() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(nn.functional.dropout(self.first(x), 0.9, self.training))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = Drops(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.part(x))

    pipe = penstock.GPipe(Outer(), stages=2, chunks=2)
    pipe(rows())
    pipe.part.eval()
    assert pipe.training
    torch.testing.assert_close(pipe(rows()), pipe.module(rows()))


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2


def test_balance_is_found_by_itself() -> None:
    """10 equal layers into 4 gave 5 partitions, 7 gave 7."""
    same = [nn.Linear(8, 8) for _ in range(10)]
    assert sorted(penstock.GPipe(nn.Sequential(*same), balance=4).balance or ()) == [2, 2, 3, 3]
    assert len(penstock.GPipe(nn.Sequential(*same[:7]), balance=4).balance or ()) == 4
    big = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 200), nn.Linear(200, 8)]
    assert penstock.GPipe(nn.Sequential(*big), balance="parameters", stages=2).balance in ([2, 2], [3, 1])
    assert penstock.GPipe(nn.Sequential(nn.Linear(8, 8))).balance == [1]
    for model, stages in ((OneLayer(), 1), (Net(), min(4, len(os.sched_getaffinity(0))))):
        pipe = penstock.GPipe(model, chunks=2)
        pipe(rows()).sum().backward()
        assert len(pipe.balance or ()) == stages
    timed = penstock.GPipe(nn.Sequential(*same), balance="time", devices=["cpu"] * 3, chunks=2)
    assert timed.balance is None
    assert timed(rows()).shape == (8, 8)
    assert sum(timed.balance or ()) == 10
    assert len(timed.balance or ()) == 3


class Clashes(nn.Module):
    """Has layers and parameters under names that GPipe uses for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks, self.devices, self._calls = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.timeout = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self._calls(self.devices(self.chunks(x)) * self.timeout)


def test_the_models_names_may_be_any() -> None:
    pipe = penstock.GPipe(Clashes(), stages=3, chunks=4)
    with pytest.warns(FallbackWarning, match="the model as a whole"):
        pipe(rows()).sum().backward()
    torch.testing.assert_close(pipe(rows()), pipe.module(rows()))
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    assert list(pipe.state_dict()) == list(Clashes().state_dict())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    pipe, x = penstock.GPipe(layers(), balance=2, chunks=2), rows()
    wanted = pipe(x)
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if torch.equal(pipe(x), wanted) else 1
        finally:
            os._exit(code)  # whatever was raised: a copy of pytest must not go on
    deadline = time.monotonic() + 60
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == child
    assert status == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
def test_torch_compile_goes_around_it() -> None:
    inner = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), balance=2, chunks=2)
    model = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        y = compiled(rows())
        y.sum().backward()
        torch.testing.assert_close(y, model(rows()))
    assert inner[0].weight.grad is not None


def test_torchs_checkpoint_around_it_and_inside_it() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: self.norm(self.layer(y)), x, use_reentrant=False)  # type: ignore[no-any-return]

    for way in ("never", "always"):
        pipe = penstock.GPipe(
            nn.Sequential(Inside(), Inside()),
            balance=2,
            chunks=4,
            checkpoint=way,
            batch_options=penstock.BatchOptions(batch_norm="deferred"),
        )
        pipe(rows()).sum().backward()
        assert pipe[0].norm.num_batches_tracked == 1
    for reentrant in (False, True):
        pipe, x = penstock.GPipe(layers(), balance=2, chunks=4), rows(requires_grad=True)
        checkpoint(pipe, x * 1.0, use_reentrant=reentrant).sum().backward()
        have, plain = pipe[0].weight.grad, layers()
        plain(x).sum().backward()
        torch.testing.assert_close(have, plain[0].weight.grad)


class Breaks(nn.Module):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind: type[BaseException] | None = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind is not None and penstock.current_microbatch() == 1:
            raise self.kind("no such luck")
        return x


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, NotImplementedError])
def test_an_error_surfaces_as_it_is_with_its_place(kind: type[BaseException]) -> None:
    broken = Breaks(kind)
    pipe, x = (
        penstock.GPipe(nn.Sequential(nn.Linear(8, 8), broken, nn.Linear(8, 8)), balance=[1, 1, 1], chunks=3),
        rows(),
    )
    with pytest.raises(kind, match="no such luck") as caught:
        pipe(x)
    assert caught.value.__notes__ == ["raised in stage 1 of 3, forward of microbatch 1 of 3 (1F1)"]
    assert any(entry.name == "forward" and "test_gpipe" in str(entry.path) for entry in caught.traceback)
    broken.kind = None
    pipe(x).sum().backward()
    torch.testing.assert_close(pipe(x), pipe.module(x))


class _BreaksBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError("on the way back")


class BreaksBack(nn.Module):
    breaks = True

    def forward(self, x: Tensor) -> Tensor:
        return _BreaksBack.apply(x) if self.breaks else x


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_error_of_the_backward_surfaces_too_and_leaves_no_gradient(checkpoint: str) -> None:
    broken = BreaksBack()
    model = nn.Sequential(nn.Linear(8, 8), broken, nn.Linear(8, 8))
    pipe = penstock.GPipe(model, balance=[1, 1, 1], chunks=3, checkpoint=checkpoint)
    with pytest.raises(ZeroDivisionError) as caught:
        pipe(rows()).sum().backward()
    assert caught.value.__notes__ == ["raised in stage 1 of 3, backward of microbatch 2 of 3 (1B2)"]
    assert all(parameter.grad is None for parameter in pipe.parameters())
    broken.breaks = False
    pipe(rows()).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("make", [layers, Net])
def test_copies_are_whole_and_apart(how: str, make: Any) -> None:
    pipe = penstock.GPipe(make(), stages=3, chunks=4)
    wanted = pipe(rows())
    if how == "deepcopy":
        other = copy.deepcopy(pipe)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(pipe))
    else:
        file = io.BytesIO()
        torch.save(pipe, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert torch.equal(other(rows()), wanted)
    assert other.module._modules is other._modules
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(pipe(rows()), wanted)
    assert not torch.equal(other(rows()), wanted)


def test_inside_a_larger_model_and_inside_another_gpipe() -> None:
    def nest(wrapped: bool) -> nn.Module:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        outer = nn.Sequential(
            nn.Linear(8, 8), penstock.GPipe(inner, balance=[2, 1], chunks=2) if wrapped else inner, nn.Linear(8, 8)
        )
        return outer

    plain, x = nest(False), rows()
    middle, whole = nest(True), penstock.GPipe(nest(True), balance=[1, 1, 1], chunks=4)
    for model in (middle, whole):
        for _ in range(2):
            model.zero_grad()
            model(x).pow(2).sum().backward()
            plain.zero_grad()
            plain(x).pow(2).sum().backward()
            for (name, have), (other, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
                assert name == other
                torch.testing.assert_close(have.grad, want.grad)


def test_one_gpipe_in_two_stages_of_another_takes_turns() -> None:
    torch.manual_seed(0)
    inner = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), balance=2, chunks=2)
    pipe = penstock.GPipe(nn.Sequential(inner, nn.Tanh(), inner), balance=[1, 1, 1], chunks=4)
    for _ in range(3):
        pipe.zero_grad()
        assert_gradients_of_its_module(pipe)


def test_a_nested_gpipe_may_draw() -> None:
    inner = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), balance=[2, 1], chunks=2)
    pipe = penstock.GPipe(nn.Sequential(nn.Dropout(0.5), inner, nn.Linear(8, 8)), balance=[1, 1, 1], chunks=3)
    found = []
    for _ in range(3):
        torch.manual_seed(5)
        y = pipe(rows())
        pipe.zero_grad()
        y.sum().backward()
        found.append([y, *(parameter.grad for parameter in pipe.parameters())])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


def test_types_change_and_devices_are_said_once() -> None:
    pipe = penstock.GPipe(layers(), balance=2, chunks=2)
    assert pipe.double()(rows().double()).dtype is torch.float64
    assert pipe.to(torch.float32)(rows()).dtype is torch.float32
    placed = penstock.GPipe(layers(), devices=["cpu", "cpu"], chunks=2)
    assert placed.balance is not None
    assert len(placed.balance) == 2
    placed(rows()).sum().backward()
    with pytest.raises(UsageError, match="stages on cpu, cpu"):
        placed.to("meta")


def test_a_layer_that_is_replaced_is_used() -> None:
    pipe = penstock.GPipe(layers(), balance=[2, 4], chunks=2)
    pipe(rows())
    setattr(pipe, "0", nn.Linear(8, 8))
    torch.testing.assert_close(pipe(rows()), pipe.module(rows()))


def test_chunks_and_checkpoint_may_change_between_calls() -> None:
    pipe = penstock.GPipe(layers(), balance=[2, 4], chunks=2)
    calls: list[bool] = []
    pipe[0].register_forward_hook(lambda *_: calls.append(penstock.is_recomputing()))
    earlier = pipe(rows())
    pipe.chunks, pipe.checkpoint = 4, "never"
    pipe(rows()).sum().backward()
    assert calls == [False] * 6
    earlier.sum().backward()  # as it was cut then
    assert calls == [False] * 6 + [True]


FACTOR: ContextVar[float] = ContextVar("factor", default=0.0)


class Factor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * FACTOR.get()


@pytest.mark.parametrize("balance", [[2, 1], [3]])
def test_layers_see_the_context_variables_of_their_call(balance: list[int]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Factor(), nn.Linear(8, 8))
    pipe = penstock.GPipe(copy.deepcopy(model), balance=balance, chunks=2, checkpoint="always")
    token = FACTOR.set(3.0)
    try:
        mine, theirs = pipe(rows()), chunked(model, rows(), 2)
    finally:
        FACTOR.reset(token)
    assert torch.equal(mine, theirs)
    mine.sum().backward()  # in which both microbatches run forward again
    theirs.sum().backward()
    assert_same_gradients(pipe, model)


def ranks_alive() -> int:
    return sum(thread.name.startswith("penstock-rank") for thread in threading.enumerate())


def settled(wanted: int) -> bool:
    deadline = time.monotonic() + 10
    while ranks_alive() > wanted and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return ranks_alive() <= wanted


def test_threads_end_with_the_model_or_when_it_is_closed() -> None:
    gc.collect()
    before = ranks_alive()
    pipe = penstock.GPipe(layers(), balance=[2, 2, 2], chunks=4)
    y = pipe(rows()).sum()
    assert ranks_alive() >= 3
    pipe.close()
    assert settled(before)
    y.backward()  # others come for it
    broken = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Breaks(ValueError)), balance=[1, 1], chunks=2)
    with pytest.raises(ValueError, match="luck"):
        broken(rows())
    del pipe, y, broken
    assert settled(before)


def test_memory_is_given_back() -> None:
    """Activations were kept. A call whose output is dropped holds nothing, nor does one that was gone back."""
    kept: list[Any] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            kept.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
            return y * y

    pipe = penstock.GPipe(nn.Sequential(nn.Linear(8, 8), Watched(), nn.Linear(8, 8)), balance=[2, 1], chunks=4)
    for ends in (True, False):
        y = pipe(rows()).sum()
        assert sum(not storage.expired() for storage in kept) == 1  # the last microbatch's
        if ends:
            y.backward()
        del y
        gc.collect()
        assert all(storage.expired() for storage in kept)
        kept.clear()
