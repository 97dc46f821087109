"""The handler of examples/overlap_moe.py: messages of one half beside the computes of the other, and equal results."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import on_processes
from test_docs import find_blocks

from penstock.errors import PeerFailure
from penstock.schedule import Action, Op, Schedule, build

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "overlap_moe.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("overlap_moe", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def backward_first() -> Schedule:
    """dualpipe-v with the halves of every pair in the other order."""

    def turned(action: Action | None) -> Action | None:
        return Action.overlap(*reversed(action.parts())) if action is not None and action.op.is_pair else action

    schedule = build("dualpipe-v", ranks=2, microbatches=6)
    return schedule.replace([[turned(action) for action in row] for row in schedule.rows])


def pairs_of(schedule: Schedule, rank: int) -> Counter[str]:
    return Counter(str(action.op) for action in schedule.rows[rank] if action is not None and action.op.is_pair)


def trained_in_all_ways() -> dict[str, Any]:
    """On each of 2 pipeline ranks x 2 expert ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    moe = load_example()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    seen: Counter[str] = Counter()

    def counting(action: Action, context: Any) -> None:
        seen[str(action.op)] += 1
        moe.overlap(action, context)

    def result(**options: Any) -> Any:
        seen.clear()
        found = moe.train(mesh, 2, **options)
        ops = {str(span.action.op) for span in found.timeline.spans}
        overlapped = sum(message.overlapped for message in found.messages)
        return found.losses, found.weights, overlapped, len(found.messages), dict(seen), ops

    turned = backward_first()
    return {
        "rank": mesh["pp"].get_local_rank(),
        "default": result(handler=None),
        "overlapped": result(handler=counting),
        "backward first": result(handler=counting, schedule=turned),
        "default, dropout": result(handler=None, drop=0.3, recompute="always"),
        "overlapped, dropout": result(handler=counting, drop=0.3, recompute="always"),
        "alone": moe.train_alone(2)[:2],
        "failure": failure_with_a_half_that_fails(moe, mesh),  # the last: the group of the experts has had its day
    }


def failure_with_a_half_that_fails(moe: ModuleType, mesh: Any) -> tuple[str | None, str]:
    """In the second pair of the first process; what each process is told."""
    run_here, pairs = moe.Layer.run_here, Counter[Any]()

    def breaks(layer: Any, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        baton = getattr(moe._here, "baton", None)
        pairs[baton] += baton is not None
        if mesh.get_rank() == 0 and len(pairs) > 2:
            raise KeyError("mine")
        result: torch.Tensor = run_here(layer, tokens, counts)
        return result

    moe.Layer.run_here = breaks
    with pytest.raises(PeerFailure) as caught:
        moe.train(mesh, 1, handler=moe.overlap)
    return caught.value.action, str(caught.value)


@pytest.fixture(scope="module")
def by_process() -> list[dict[str, Any]]:
    return on_processes(4, trained_in_all_ways)


@pytest.mark.slow
def test_the_handler_changes_no_bit_over_two_steps(by_process: list[dict[str, Any]]) -> None:
    for found in by_process:
        for name in ("overlapped", "backward first"):
            assert found[name][0] == found["default"][0]
            assert all(torch.equal(found[name][1][key], value) for key, value in found["default"][1].items())


@pytest.mark.slow
def test_random_numbers_are_not_mixed_up_by_taking_turns(by_process: list[dict[str, Any]]) -> None:
    """With recompute both halves draw, and each has messages in the middle of it."""
    for found in by_process:
        wanted, got = found["default, dropout"], found["overlapped, dropout"]
        assert got[0] == wanted[0]
        assert all(torch.equal(got[1][key], value) for key, value in wanted[1].items())
        assert got[0] != found["default"][0]  # the dropout is there


@pytest.mark.slow
def test_pipeline_and_experts_on_four_processes_equal_one_process(by_process: list[dict[str, Any]]) -> None:
    covered: set[str] = set()
    for found in by_process:
        losses, weights = found["alone"]
        torch.testing.assert_close(found["overlapped"][0], losses)
        torch.testing.assert_close(found["overlapped"][1], {name: weights[name] for name in found["overlapped"][1]})
        covered |= set(found["overlapped"][1])
    assert covered == set(by_process[0]["alone"][1])


@pytest.mark.slow
def test_messages_are_under_way_while_the_other_half_computes(by_process: list[dict[str, Any]]) -> None:
    for found in by_process:
        pairs = pairs_of(build("dualpipe-v", 2, 6), found["rank"])
        assert found["overlapped"][4] == {op: 2 * count for op, count in pairs.items()}  # two steps
        assert found["backward first"][4] == {"OVERLAP_B_F": 2 * pairs["OVERLAP_F_B"]}
        assert found["default"][2] == 0
        for name in ("overlapped", "backward first"):
            assert found[name][3] == found["default"][3]  # as many messages
            assert found[name][2] >= 4 * pairs["OVERLAP_F_B"]  # of a pair's five or more, all but the last


@pytest.mark.slow
def test_a_half_that_fails_is_named_by_all_and_nobody_waits_for_its_messages(by_process: list[dict[str, Any]]) -> None:
    """Processes 0 and 2 are one pipeline, 1 and 3 the other, which only hears of it through the experts' group.

    That group has no timeout that a test could wait for.
    """
    (action, told), (_, theirs) = by_process[0]["failure"], by_process[1]["failure"]
    assert action is not None
    assert "F" in action
    assert f"action {action}" in told
    assert "KeyError: 'mine'" in told
    assert by_process[2]["failure"][0] == action
    for process in (1, 3):
        assert "another rank of the experts' group: rank 0 failed" in by_process[process]["failure"][1]
        assert "KeyError: 'mine'" in by_process[process]["failure"][1]
    assert f"action {action}" in theirs


@pytest.mark.slow
def test_the_timeline_has_the_pairs(by_process: list[dict[str, Any]]) -> None:
    for found in by_process:
        assert "OVERLAP_F_B" in found["overlapped"][5]
        assert "OVERLAP_B_F" in found["backward first"][5]
        assert not {"OVERLAP_F_B", "OVERLAP_B_F"} & found["default"][5]


# The baton by itself.


def run_halves(halves: list[list[str]], fails: str = "") -> tuple[list[str], list[BaseException]]:
    """Each half says its words, and gives way after each but the last."""
    moe = load_example()
    baton, said, errors = moe.Baton(), [], []

    def half(me: int) -> None:
        for number, word in enumerate(halves[me]):
            if number:
                baton.give_way(me)
            said.append(word)
            if word == fails:
                raise ValueError(word)

    def run(me: int) -> None:
        try:
            baton.run(me, lambda: half(me))
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,), daemon=True) for me in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return said, errors


@pytest.mark.parametrize(
    ("halves", "order"),
    [
        (["a b c", "1 2 3"], "a 1 b 2 c 3"),
        (["a", "1 2 3"], "a 1 2 3"),
        (["a b c d", "1"], "a 1 b c d"),
        (["a b", ""], "a b"),
    ],
)
def test_halves_take_turns_however_many_messages_each_has(halves: list[str], order: str) -> None:
    for _ in range(5):
        assert run_halves([half.split() for half in halves])[0] == order.split()


@pytest.mark.parametrize(("fails", "order"), [("b", "a 1 b 2 3"), ("2", "a 1 b 2 c")])
def test_a_half_that_fails_leaves_the_other_to_end(fails: str, order: str) -> None:
    said, errors = run_halves([["a", "b", "c"], ["1", "2", "3"]], fails)
    assert said == order.split()
    assert [str(error) for error in errors] == [fails]


def test_an_error_in_a_half_is_told_with_its_action() -> None:
    """As threads, without messages: what the handler does with an error does not depend on them."""
    import penstock

    moe = load_example()
    broken = threading.Event()

    class Stage(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if broken.is_set() and self.fails and x.sum() > 1e6:
                raise KeyError("mine")
            return super().forward(x)

    stages = [Stage(4, 4) for _ in range(2)]
    for number, stage in enumerate(stages):
        stage.fails = number == 0
    pipe = penstock.Pipeline(stages, microbatches=4, schedule="dualpipe-v", loss_fn=torch.nn.functional.mse_loss)
    for op in (Op.OVERLAP_F_B, Op.OVERLAP_B_F):
        pipe.register(op, moe.overlap)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    wanted = pipe.step(x, target=y).loss
    broken.set()
    spoiled = x.clone()
    spoiled[6:] = 1e9  # the last microbatch, whose forward is half of a pair
    with pytest.raises(PeerFailure, match="mine") as caught:
        pipe.step(spoiled, target=y)
    assert caught.value.action == "0F3"
    assert pairs_of(pipe.schedule, 0)
    pipe.zero_grad()
    assert torch.equal(pipe.step(x, target=y).loss, wanted)
    pipe.close()


def test_the_documented_handler_is_the_one_that_runs() -> None:
    blocks = [
        block for block in find_blocks((ROOT / "docs/guides/overlap.md").read_text()) if block.language == "python"
    ]
    assert len(blocks) == 3
    for block in blocks[:2]:  # the third searches for a schedule with pairs
        assert block.text in EXAMPLE.read_text()
