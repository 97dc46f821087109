"""PipelineTrainer on two processes, against transformers' own Trainer on one: same losses, same files, exact resume.

One group of two processes runs all that two are needed for, because each of them loads a trainer, which takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import lazily
from processes import on_processes
from safetensors.torch import load_file

import penstock
from penstock.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*")


hf = lazily("integrations.hugging_face")


Case = dict[str, Any]


def metrics(found: Any) -> dict[str, float]:
    return {"mean": float(found.predictions.mean()), "counted": float((found.label_ids != -100).sum())}


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own, in double precision, divided by what the accumulated batch has."""
    logits, target = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def run(kind: Any, folder: str, case: Case, **more: Any) -> dict[str, Any]:
    heard = hf.Heard()
    trainer = kind(
        hf.llama(**case.get("model", {})),
        hf.arguments(folder, **case.get("args", {})),
        train_dataset=hf.Text(case.get("rows", 10)),
        eval_dataset=hf.Text(case.get("eval_rows", 7), 1),
        compute_metrics=metrics,
        callbacks=[heard, *case.get("callbacks", [])],
        compute_loss_func=summed if case.get("own_loss") else None,
        **more,
    )
    trainer.train(resume_from_checkpoint=case.get("resume"))
    trainer.evaluate()
    predicted = trainer.predict(hf.Text(7, 1))  # replicas pad it, and drop the padding
    trainer.save_model(f"{folder}/saved")
    is_plain = kind is hf.Trainer
    state = trainer.model.state_dict() if is_plain else trainer.pipe.full_state_dict()
    # `predictions` and metrics that a clock has no part in
    return {
        "logged": hf.logged(trainer),
        "state": state,
        "heard": heard.count,
        "predictions": torch.from_numpy(predicted.predictions),
        "counted": predicted.metrics["test_counted"],
    }


def pipelined(folder: str) -> list[dict[str, Any]]:
    """On each rank."""
    return [
        run(hf.PipelineTrainer, f"{folder}/{number}", case, pipeline=case.get("pipeline"))
        for number, case in enumerate(CASES)
    ]


def on_two(folder: str) -> dict[str, Any]:
    hf.as_torchrun()
    return {each.__name__: each(f"{folder}/{each.__name__}") for each in (pipelined, interrupted, best)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[dict[str, Any]]]:
    """Where they wrote, what a run without a pipeline found (`plain` there), and what each of two processes did."""
    folder = tmp_path_factory.mktemp("two")
    plain = run(hf.Trainer, str(folder / "plain"), {"args": {"save_strategy": "steps", "save_steps": 2}})
    return folder, plain, on_processes(2, on_two, str(folder), limit=300, loading=["integrations.hugging_face"])


def same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    assert [set(entry) for entry in found["logged"]] == [set(entry) for entry in plain["logged"]]
    for ours, theirs in zip(found["logged"], plain["logged"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)  # losses are float32 in transformers
        if "grad_norm" in theirs:
            assert float(ours["grad_norm"]) == pytest.approx(float(theirs["grad_norm"]), rel=1e-10)
    torch.testing.assert_close(found["state"], plain["state"], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found["predictions"], plain["predictions"], rtol=1e-9, atol=1e-10)
    assert (found["heard"], found["counted"]) == (plain["heard"], plain["counted"])


CASES: list[Case] = [
    {},  # all defaults, a last batch of two rows
    {"args": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}, "pipeline": {"microbatches": 2}},
    {
        "args": {
            "label_smoothing_factor": 0.1,
            "eval_strategy": "epoch",
            "optim": "adafactor",
            "gradient_accumulation_steps": 2,
        },
        "model": {"tie_word_embeddings": True},
        "pipeline": {"schedule": "zb-v", "microbatches": 4},
    },
    {"args": {"gradient_accumulation_steps": 3}, "own_loss": True},
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_weights_metrics_and_files_are_those_of_a_trainer_without_a_pipeline(two: Any) -> None:
    folder, _, ranks = two
    for number, case in enumerate(CASES):
        plain = run(hf.Trainer, str(folder / f"plain{number}"), case)
        for told in ranks:
            same(told["pipelined"][number], plain)
        saved = [load_file(path / "saved" / "model.safetensors") for path in (folder / f"pipelined/{number}",)]
        assert set(saved[0]) == set(load_file(folder / f"plain{number}/saved/model.safetensors"))
        loaded = hf.AutoModelForCausalLM.from_pretrained(folder / f"pipelined/{number}/saved", dtype=torch.float64)
        torch.testing.assert_close(
            dict(loaded.state_dict()), dict(ranks[0]["pipelined"][number]["state"]), rtol=0, atol=0
        )


def interrupted(folder: str) -> Any:
    """A run, and the same one stopped after its second checkpoint and resumed by a new trainer."""
    args = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
    dropped = {"attention_dropout": 0.2}
    whole = run(hf.PipelineTrainer, f"{folder}/whole", {"args": args, "model": dropped}, pipeline={"microbatches": 2})
    resumed = run(
        hf.PipelineTrainer,
        f"{folder}/resumed",
        {"args": args, "model": dropped, "resume": f"{folder}/whole/checkpoint-4"},
        pipeline={"microbatches": 2},
    )
    plain = run(hf.PipelineTrainer, f"{folder}/other", {"args": args, "resume": f"{folder}/../plain/checkpoint-4"})
    return whole, resumed, plain


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_resumes_to_the_bit_and_to_and_from_a_trainer_without_a_pipeline(two: Any, tmp_path: Path) -> None:
    folder, plain, ranks = two
    whole, resumed, from_plain = ranks[0]["interrupted"]
    for name, value in whole["state"].items():
        assert torch.equal(value, resumed["state"][name]), name
    assert whole["logged"][-1] == resumed["logged"][-1]
    torch.testing.assert_close(from_plain["state"], plain["state"], rtol=1e-9, atol=1e-10)

    # and back: a Trainer takes a pipeline's checkpoint
    theirs = str(folder / "interrupted/other/checkpoint-6")
    names = {path.name for path in Path(theirs).iterdir()} - {"pipeline.json", "rng_state_0.pth", "rng_state_1.pth"}
    assert names == {path.name for path in (folder / "plain/checkpoint-6").iterdir()} - {"rng_state.pth"}
    longer = {"num_train_epochs": 3, "lr_scheduler_type": "constant"}
    back = run(hf.Trainer, str(tmp_path / "back"), {"args": longer, "resume": theirs})
    on = run(hf.Trainer, str(tmp_path / "on"), {"args": longer, "resume": str(folder / "plain/checkpoint-6")})
    torch.testing.assert_close(back["state"], on["state"], rtol=1e-9, atol=1e-10)


BEST = {
    "num_train_epochs": 4,
    "learning_rate": 0.3,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "load_best_model_at_end": True,
    "metric_for_best_model": "mean",
    "save_total_limit": 1,
}


HALF = {"bf16": True, "gradient_checkpointing": True}


def stopping() -> Case:
    return {"args": BEST, "callbacks": [hf.EarlyStoppingCallback(1)]}


def best(folder: str) -> Any:
    found = run(hf.PipelineTrainer, folder, stopping(), pipeline={"microbatches": 4})
    half = run(hf.PipelineTrainer, f"{folder}/half", {"args": HALF})
    (kept,) = Path(folder).glob("checkpoint-*")
    with pytest.raises(CheckpointError, match="parameter groups"):
        run(hf.PipelineTrainer, f"{folder}/wrong", {"model": {"attention_bias": True}, "resume": str(kept)})
    return found, half


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_best_model_is_loaded_and_bf16_and_recomputation_train(two: Any, tmp_path: Path) -> None:
    ranks = [told["best"] for told in two[2]]
    plain = run(hf.Trainer, str(tmp_path / "plain"), stopping())
    half = run(hf.Trainer, str(tmp_path / "half"), {"args": HALF})
    for found, in_half in ranks:
        assert found["heard"] == plain["heard"]
        torch.testing.assert_close(found["state"], plain["state"], rtol=1e-6, atol=1e-8)
        for ours, theirs in zip(in_half["logged"], half["logged"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-2)


EVEN = {"rows": 16, "eval_rows": 8}  # a last batch that is not full is padded with rows of the first, by accelerate


def replicated(folder: str) -> Any:
    hf.as_torchrun()
    args = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2}
    pipeline = {"mesh": penstock.mesh(pp=2, dp=2), "microbatches": 2}
    return run(hf.PipelineTrainer, folder, {**EVEN, "args": args}, pipeline=pipeline)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_replicas_of_a_pipeline_train_as_one_process_on_batches_twice_as_large(tmp_path: Path) -> None:
    ranks = on_processes(4, replicated, str(tmp_path / "replicas"), loading=["integrations.hugging_face"])
    plain = run(hf.Trainer, str(tmp_path / "plain"), {**EVEN, "args": {"gradient_accumulation_steps": 2}})
    for found in ranks:
        same(found, plain)


def test_in_one_process_stages_run_as_threads(tmp_path: Path) -> None:
    case: Case = {"args": {"max_steps": 2}}
    same(
        run(hf.PipelineTrainer, str(tmp_path / "threads"), case, pipeline={"stages": 2, "microbatches": 2}),
        run(hf.Trainer, str(tmp_path / "plain"), case),
    )
