"""What a handler of the user's own sees of the step."""

from __future__ import annotations

from typing import Any

import torch
from processes import on_processes
from torch import nn

import penstock
from penstock.schedule import Op, build


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64).double() for _ in range(4)))


def trained(**given: Any) -> dict[str, Any]:
    """Two steps with a handler for backwards, of overlapped pairs too; the gradients, and what the handler saw."""
    schedule = build("interleaved-1f1b", 2, 4, 2, overlap_b_f=True)
    model = layers()
    pipe = penstock.Pipeline(model, stages=4, schedule=schedule, loss_fn=nn.functional.mse_loss, **given)
    programs, sends = [], set()

    def look(action: Any, context: Any) -> None:
        programs.append(context.schedule is pipe.program)
        sends.update(context.sends)
        context.run(action)

    for op in (Op.B, Op.OVERLAP_B_F):
        pipe.register(op, look)
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for parameter in pipe.parameters():
            parameter.grad = None
        pipe.step(x, target=x)
    plain = layers()
    nn.functional.mse_loss(plain(x), x).backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad)
    pipe.close()
    return {"programs": programs, "sends": sends}


def on_a_rank() -> dict[str, Any]:
    return {transport: trained(transport=transport) for transport in ("distributed", "shared")}


def test_a_handler_sees_the_program_and_the_sends_under_way() -> None:
    found = trained(ranks=2)
    assert found["programs"]
    assert all(found["programs"])
    assert found["sends"] == set()  # threads hand values over
    for rank in on_processes(2, on_a_rank):
        assert all(rank["distributed"]["programs"] + rank["shared"]["programs"])
        assert rank["distributed"]["sends"]
        assert {microbatch for _, microbatch in rank["distributed"]["sends"]} <= set(range(4))
        assert rank["shared"]["sends"] == set()  # values are copied at once
