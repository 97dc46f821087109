"""Torch works on the pretended device, under both names, and with streams that run behind the host as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from accelerator.harness import NAMES, on_device
from tiers import mostly_slow

CHECKS: list[Callable[[Any, Any], None]] = []


def check(case: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    CHECKS.append(case)
    return case


@check
def tensors_go_there_and_come_back(torch: Any, on: Any) -> None:
    there = torch.arange(24.0).to(on)
    assert there.device == on
    assert torch.equal(there.cpu(), torch.arange(24.0))
    assert there.view(2, 3, 4).transpose(1, 2).reshape(8, 3)[1:, ::2].sum().item() == 176
    assert "device=" in repr(there)
    assert torch.equal(there[there > 20].cpu(), torch.tensor([21.0, 22.0, 23.0]))


@check
def a_model_trains_as_on_the_cpu(torch: Any, on: Any) -> None:
    def trained(where: Any, optimizer: Any) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Embedding(17, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.GELU()
        ).to(where)
        model.append(torch.nn.Linear(16, 17).to(where))
        ids = (torch.arange(40).view(4, 10) % 17).to(where)
        made = optimizer(model.parameters())
        for _ in range(3):
            made.zero_grad()
            torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            made.step()
        return [each.detach().cpu() for each in model.parameters()]

    makes = [
        lambda given: torch.optim.SGD(given, 0.1, momentum=0.9),
        lambda given: torch.optim.AdamW(given, 0.01, foreach=True),
        lambda given: torch.optim.AdamW(given, 0.01, fused=True),
    ]
    for make in makes:
        for found, wanted in zip(trained(on, make), trained("cpu", make), strict=True):
            assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)


@check
def backward_runs_on_a_thread_of_the_device(torch: Any, on: Any) -> None:
    import threading

    found = []
    x = torch.ones(2, device=on, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(lambda _: found.append((threading.get_ident(), torch.accelerator.current_device_index())))
    y.backward()
    assert found[0][0] != threading.get_ident()
    assert found[0][1] == on.index


@check
def random_numbers_belong_to_the_generator_of_a_device(torch: Any, on: Any) -> None:
    torch.manual_seed(1)
    of_cpu, state = torch.get_rng_state(), torch.get_device_module(on.type).get_rng_state(on)
    assert state.numel() == 16
    first = torch.nn.functional.dropout(torch.ones(64, device=on), 0.5)
    second = torch.nn.functional.dropout(torch.ones(64, device=on), 0.5)
    assert torch.equal(of_cpu, torch.get_rng_state())
    assert not torch.equal(first.cpu(), second.cpu())
    torch.get_device_module(on.type).set_rng_state(state, on)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(64, device=on), 0.5).cpu(), first.cpu())
    generator = torch.Generator(device=on).manual_seed(3)
    one = torch.randn(3, device=on, generator=generator)
    assert torch.equal(one.cpu(), torch.randn(3, device=on, generator=generator.manual_seed(3)).cpu())


@check
def autocast_and_a_scaler_of_losses(torch: Any, on: Any) -> None:
    model = torch.nn.Linear(4, 4).to(on)
    with torch.autocast(on.type, dtype=torch.bfloat16):
        out = model(torch.ones(2, 4, device=on))
        assert out.dtype == torch.bfloat16
        assert out.softmax(-1).dtype == torch.float32
    scaler = torch.amp.GradScaler(on.type, init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler.scale(model(torch.ones(2, 4, device=on)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


@check
def tensors_are_saved_and_loaded_onto_the_device(torch: Any, on: Any) -> None:
    import io

    file = io.BytesIO()
    torch.save({"a": torch.arange(3.0, device=on)}, file)
    for where, device in ((None, on), ("cpu", torch.device("cpu")), (on, on)):
        file.seek(0)
        found = torch.load(file, map_location=where)["a"]
        assert found.device == device
        assert torch.equal(found.cpu(), torch.arange(3.0))


@check
def memory_is_counted_and_limited(torch: Any, on: Any) -> None:
    from accelerator import pretend

    module = torch.get_device_module(on.type)
    before = module.memory_allocated(on)
    module.reset_peak_memory_stats(on)
    x = torch.ones(1000, device=on)
    assert module.memory_allocated(on) - before == 4000
    del x
    assert module.memory_allocated(on) == before
    assert module.max_memory_allocated(on) - before == 4000
    pretend.native.limit_memory(before + 2000)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 4000 bytes"):
        torch.ones(1000, device=on)
    pretend.native.limit_memory(0)


@check
def devices_are_not_mixed(torch: Any, on: Any) -> None:
    other = torch.device(on.type, on.index + 1)
    for stranger in (torch.ones(2), torch.ones(2, device=other)):
        with pytest.raises(RuntimeError, match="to be on the same device"):
            torch.ones(2, device=on) + stranger


@check
def a_checkpointed_forward_draws_the_same_numbers_again(torch: Any, on: Any) -> None:
    seen = []

    def forward(x: Any) -> Any:
        out = torch.nn.functional.dropout(x, 0.5)
        seen.append(out.detach().cpu() != 0)
        return out * x

    x = torch.ones(64, device=on, requires_grad=True)
    torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def failures(deferred: bool) -> dict[str, str]:
    import traceback

    import torch
    from accelerator import pretend

    found = {}
    on = pretend.device(2)
    torch.accelerator.set_device_index(on.index)
    pretend.defer(deferred)
    for case in CHECKS:
        try:
            globals()[case.__name__](torch, on)
            torch.accelerator.synchronize(on)
        except Exception:
            found[case.__name__] = traceback.format_exc()
    found.update({f"unshaped {each}": "" for each in pretend.native.unshaped()})
    return found


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
@pytest.mark.parametrize("name", mostly_slow(NAMES, "pretend"))
def test_torch_works_on_the_device(name: str, deferred: bool) -> None:
    outcome = on_device(failures, deferred, name=name)
    assert outcome.value == {}, "\n".join(outcome.value.values())
    assert outcome.races == []
