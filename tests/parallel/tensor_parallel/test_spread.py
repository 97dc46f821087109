"""Tensors spread over ranks, under pipelines with and without replicas, compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel import spread
from parallel.cases import whole_of
from parallel.spread import (
    LENGTH,
    ROWS,
    WIDTH,
    Case,
    M,
    all_pipelined,
    batch,
    pipelined,
    plain,
    sequence_plan,
)
from processes import on_processes
from tiers import tiers
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput
from torch.nn import functional as F

import penstock
from penstock.errors import PenstockError
from penstock.tools.train.config.settings import GPTOptions
from penstock.tools.train.models.gpt import build_gpt


def differences(case: Case, outcomes: list[dict[str, Any]], replicas: int) -> list[str]:
    wanted, faults, seen = plain(case.tied), [], set()
    outputs = [found.pop("output") for found in outcomes]
    output = torch.cat([each for each in outputs if each is not None][:: len(outcomes) // 2 // replicas])
    if not torch.allclose(output, wanted.pop("output"), rtol=1e-10, atol=1e-10):
        faults.append("output")
    for rank, found in enumerate(outcomes):
        local = found.pop("local")
        size = sum(value.numel() for name, value in found.items() if f"{name}.grad" in found)
        if local >= size:
            faults.append(f"rank {rank} holds {local} of {size} numbers")
        for name, value in found.items():
            name = name.replace("5.scores.weight", "0.weight") if case.tied else name
            seen.add(name)
            if not torch.allclose(value, wanted[name], rtol=1e-10, atol=1e-10):
                faults.append(f"rank {rank}, {name}: {value} is not {wanted[name]}")
    return faults + [f"missing {name}" for name in set(wanted) - seen]


def check(cases: list[Case], **sizes: int) -> None:
    ranks = torch.tensor(list(sizes.values())).prod().item()
    by_rank = on_processes(int(ranks), all_pipelined, cases, sizes)
    faults = {
        str(case): found
        for number, case in enumerate(cases)
        if (found := differences(case, [outcomes[number] for outcomes in by_rank], sizes.get("dp", 1)))
    }
    assert faults == {}


CASES = [Case("zb-v", "sequence", stages=4)]
MORE_CASES = [Case("1f1b"), Case("1f1b", "loss"), Case("interleaved-1f1b", tied=True, stages=4)]


def plain_pipeline(model: Any, mesh: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        model,
        stages=2,
        microbatches=M,
        loss_fn=spread.loss_fn,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(tensor_plan=spread.PLAIN),
        timeout=20,
    )


def scaled(mesh: Any) -> tuple[list[float], float]:
    """Loss scaling and clipping over parameters of which some are spread and some are whole."""
    ids, target = batch()
    with plain_pipeline(spread.model(), mesh) as pipe:
        scaler = penstock.GradScaler(pipe, init_scale=8.0)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            result = pipe.step(ids, target=target)
            losses.append(result.loss.item())
            if step == 1 and mesh.get_rank() == 3:  # an overflow in one part of one tensor
                next(p for p in pipe.parameters() if hasattr(p, "full_tensor")).grad._local_tensor[0] = float("inf")
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(1.0)
            pipe.clip_grad_value_(0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return losses, scaler.get_scale()


@pytest.mark.slow
def test_loss_scaling_and_clipping_of_spread_and_whole_parameters_together(told_others: Any) -> None:
    whole = spread.model()
    ids, target = batch()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = spread.loss_fn(whole(ids), target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        torch.nn.utils.clip_grad_value_(whole.parameters(), 0.05)
        if step != 1:  # the overflow: all leave the step out
            optimizer.step()
    for rank in told_others:
        found, scale = rank["scaled"]
        assert found == pytest.approx(losses, rel=1e-9)
        assert scale == 4.0


def some() -> dict[str, Any]:
    mesh = penstock.mesh(pp=2, tp=2)
    found: dict[str, Any] = {each.__name__: each(mesh) for each in (crossing, ready_plans)}
    return {**found, "cases": [pipelined(case, mesh) for case in CASES]}


def others() -> dict[str, Any]:
    mesh = penstock.mesh(pp=2, tp=2)
    found: dict[str, Any] = {each.__name__: each(mesh) for each in (mistakes, replayed, scaled)}
    return {**found, "cases": [pipelined(case, mesh) for case in MORE_CASES]}


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each process saw: both shards of rank 0, then of rank 1."""
    return on_processes(4, some)


@pytest.fixture(scope="module")
def told_others() -> list[dict[str, Any]]:
    """The same, of the scenarios that the slow tests look at."""
    return on_processes(4, others)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_pipeline_by_tensor(told: Any, number: int) -> None:
    assert differences(CASES[number], [dict(rank["cases"][number]) for rank in told], 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MORE_CASES)), ids=lambda number: str(MORE_CASES[number]))
def test_more_pipelines_by_tensor(told_others: Any, number: int) -> None:
    assert differences(MORE_CASES[number], [dict(rank["cases"][number]) for rank in told_others], 1) == []


@pytest.mark.parametrize(
    "cases",
    tiers(
        [
            Case("1f1b", replicate="ddp"),
            Case("interleaved-1f1b", tied=True, replicate="fsdp", stages=4),
        ],
        [
            Case("zb-v", "sequence", replicate="fsdp", stages=4),
            Case("1f1b", "loss", replicate="fsdp"),
            Case("zb-v", tied=True, replicate="ddp", stages=4),
        ],
    ),
    ids=["some", "others"],
)
def test_three_axes_on_eight_processes(cases: list[Case]) -> None:
    check(cases, pp=2, dp=2, tp=2)


def ready_plans(mesh: Any, hugging: bool = False) -> dict[str, Any]:
    """The plans that come with Penstock, on the models that they are for; what each process saw."""
    found: dict[str, Any] = {}
    for name, (model, args, loss_fn, options) in ready_models(hugging).items():
        with penstock.Pipeline(
            model, stages=2, microbatches=2, schedule="1f1b", loss_fn=loss_fn, mesh=mesh, timeout=30, **options
        ) as pipe:
            result = pipe.step(*args[0], target=args[1])
            parted = [each for each, parameter in pipe.named_parameters() if hasattr(parameter, "full_tensor")]
            found[name] = (
                result.loss,
                {each: whole_of(parameter.grad) for each, parameter in pipe.named_parameters()},
                parted,
            )
    return found


class Followed(torch.nn.Module):
    """Its forward looks at a number on the way, so every stage follows it from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = spread.model()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if int(ids.max()) >= spread.WORDS:
            raise ValueError("no such word")
        x: torch.Tensor = ids
        for layer in self.layers:
            x = layer(x)
        return x


def replayed(_: Any) -> Any:
    """A model that is cut by its forward, spread and then sharded: later stages must know what earlier ones return.

    Two stages on each rank, the first one sharded again when the second runs, for microbatches unlike the example.
    """
    mesh = penstock.mesh(pp=1, dp=2, tp=2)
    plan = {
        {"0": "layers.0", "5.scores": "layers.5.scores"}.get(name, name): each for name, each in spread.PLAIN.items()
    }
    ids, target = (each.chunk(2)[mesh.get_local_rank("dp")] for each in batch())
    with penstock.Pipeline(
        Followed(),
        stages=2,
        microbatches=M,
        schedule="interleaved-1f1b",
        example=(torch.zeros(LENGTH, LENGTH, dtype=torch.int64),),
        loss_fn=spread.loss_fn,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(replicate="fsdp", window=1, tensor_plan=plan),
        timeout=30,
    ) as pipe:
        loss = pipe.step(ids, target=target).loss
        evaluated = pipe.evaluate(ids, target=target).loss
        return loss, evaluated, {name: whole_of(each.grad) for name, each in pipe.named_parameters()}


@pytest.mark.slow
def test_a_model_that_is_cut_by_its_forward_can_be_spread_and_sharded(told_others: Any) -> None:
    whole = Followed()
    ids, target = batch()
    wanted = spread.loss_fn(whole(ids), target)
    wanted.backward()
    for rank in told_others:
        loss, evaluated, gradients = rank["replayed"]
        torch.testing.assert_close((loss, evaluated), (wanted.detach(),) * 2, rtol=1e-10, atol=1e-10)
        assert len(gradients) == len(list(whole.parameters()))
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(getattr(output, "logits", output).flatten(0, 1), target.flatten())


def ready_models(hugging: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    ids = torch.randint(16, (4, 6))
    batch = ((ids,), ids.roll(-1, 1))
    if not hugging:
        options = GPTOptions(vocabulary=16, width=8, heads=4, layers=2, context=6, dropout=0.0)
        return {
            "gpt": (
                build_gpt(options, 6).double(),
                batch,
                loss_of,
                {"parallel_options": penstock.ParallelOptions(tensor_plan="gpt")},
            )
        }
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    llama = LlamaForCausalLM(config).double()
    config.tie_word_embeddings = True
    tied = LlamaForCausalLM(config).double()

    given = {"parallel_options": penstock.ParallelOptions(tensor_plan="llama"), "example": (ids[:2],)}
    return {"llama": (llama, batch, loss_of, given), "tied llama": (tied, batch, loss_of, given)}


def attempt(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        function(*args, **kwargs)
    except PenstockError as error:
        return type(error).__name__, str(error)
    return "", ""


def mistakes(mesh: Any) -> list[Any]:
    """Plans that do not fit, and one that would train wrongly in silence."""
    ids, target = batch()

    def made(plan: Any, tied: bool = False) -> penstock.Pipeline:
        return penstock.Pipeline(
            spread.model(tied),
            stages=2,
            microbatches=M,
            loss_fn=spread.loss_fn,
            mesh=mesh,
            parallel_options=penstock.ParallelOptions(tensor_plan=plan),
            timeout=20,
        )

    halved = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    )  # and the norm inside, a plain one, sees half of the rows
    forgot = {"5": halved, "5.scores": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    found = [
        attempt(made, {"*.atention.query": "colwise"}),
        attempt(made, {"*.up": "columns"}),
        attempt(made, {"*.first": "colwise"}),
        attempt(made, None),
        attempt(made, "bert"),
        attempt(made, {"0": "embedding"}, tied=True),
        attempt(made, {"5.scores": "colwise-gathered", "0": "colwise"}, tied=True),
    ]
    pipe = made(forgot)
    found.append(attempt(pipe.step, ids, target=target))
    pipe.close()
    with made(spread.PLAIN) as pipe:  # each process loads rows of its own: all shapes fit
        shard = mesh.get_local_rank("tp")
        found.append(attempt(pipe.step, ids.roll(shard, 0), target=target.roll(shard, 0)))
    with made(spread.PLAIN) as pipe:
        scaler = penstock.GradScaler(pipe, init_scale=4.0 + mesh.get_local_rank("tp"))
        pipe.step(ids, target=target)
        found.append(attempt(scaler.unscale_, torch.optim.SGD(pipe.parameters(), lr=0.1)))
    whole = spread.model()
    early = torch.optim.SGD(whole.parameters(), lr=0.1)
    with plain_pipeline(whole, mesh) as pipe:
        pipe.step(ids, target=target)
        found.append(attempt(early.step))
    return found


@pytest.mark.slow
def test_plans_that_do_not_fit_are_refused_by_name(told_others: Any) -> None:
    for rank in told_others:
        pattern, style, kind, none, name, apart, across, partial, rows, scales, early = rank["mistakes"]
        assert [each[0] for each in (pattern, style, kind, none, name)] == ["UsageError"] * 5
        assert "no module matches '*.atention.query'; the model has, for example, '4.attention.query'" in pattern[1]
        assert "the style 'columns': choose one of 'colwise'" in style[1]
        assert "(LayerNorm) cannot be spread by ColwiseParallel" in kind[1]
        assert "the mesh has tp=2, but no ParallelOptions(tensor_plan=)" in none[1]
        assert "tensor_plan='bert'" in name[1]
        assert (apart[0], across[0], partial[0]) == ("ModelError", "ModelError", "ModelError")
        assert "tied across ranks has (6, 8)" in apart[1] or "tied across ranks has (12, 8)" in apart[1]
        assert "ParallelOptions(tensor_plan=) must spread all of its modules alike" in across[1]
        assert "the gradient of 5.norm.weight differs between the ranks of the tp axis" in partial[1]
        assert rows[0] == "ModelError"
        assert "the ranks of the tp axis were given different batches" in rows[1]
        assert (scales[0], early[0]) == ("UsageError", "UsageError")
        assert "(rank 0: 4 and 5, rank 1: 4 and 5)" in scales[1]
        assert "this SGD was made before the Pipeline" in early[1]


def crossing(mesh: Any) -> list[Any]:
    """What leaves each stage when the sequence is spread between them."""
    left = []
    with penstock.Pipeline(
        spread.model(),
        stages=2,
        microbatches=M,
        loss_fn=spread.loss_fn,
        mesh=mesh,
        parallel_options=penstock.ParallelOptions(tensor_plan=sequence_plan(True)),
        timeout=20,
    ) as pipe:
        (executor,) = pipe.deployment.ranks.executors.values()
        put_outputs, put_gradients = executor.mailbox.put_outputs, executor.mailbox.put_gradients

        def outputs(stage: int, microbatch: int, emitted: Any) -> None:
            left.extend((type(each).__name__, each.placements, tuple(each.local.shape)) for each in emitted.values())
            put_outputs(stage, microbatch, emitted)

        def gradients(stage: int, microbatch: int, back: Any) -> None:
            left.extend((type(each).__name__, each.placements, tuple(each.local.shape)) for (each,) in back.values())
            put_gradients(stage, microbatch, back)

        executor.mailbox.put_outputs, executor.mailbox.put_gradients = outputs, gradients  # type: ignore[method-assign]
        pipe.step(*batch()[:1], target=batch()[1])
    return left


def test_spread_values_cross_stages_as_they_are_and_only_a_part_travels(told: Any) -> None:
    for rank in told:
        assert rank["crossing"] == [("SpreadPart", (("S", 1),), (ROWS // M, LENGTH // 2, WIDTH))] * M


def check_ready(by_rank: list[dict[str, Any]], hugging: bool) -> None:
    for name, (model, args, loss_fn, _) in ready_models(hugging).items():
        loss = loss_fn(model(*args[0]), args[1])
        loss.backward()
        wanted = {each: parameter.grad for each, parameter in model.named_parameters()}
        seen: set[str] = set()
        for found, gradients, parted in (rank[name] for rank in by_rank):
            torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-10)
            assert len(parted) >= 6
            for each, gradient in gradients.items():
                torch.testing.assert_close(gradient, wanted[each], rtol=1e-9, atol=1e-9, msg=f"{name}: {each}")
                seen.add(each)
        assert seen == set(wanted)


def test_the_ready_plan_for_the_built_in_gpt(told: Any) -> None:
    check_ready([rank["ready_plans"] for rank in told], hugging=False)


def ready_for_llama() -> dict[str, Any]:
    return ready_plans(penstock.mesh(pp=2, tp=2), hugging=True)


@pytest.mark.slow
def test_the_ready_plan_for_hugging_face_llama_also_with_tied_weights() -> None:
    check_ready(on_processes(4, ready_for_llama, loading=["transformers.models.llama.modeling_llama"]), hugging=True)
