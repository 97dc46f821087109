"""PipelineStrategy on two processes, against Lightning's own Trainer on one, with the same LightningModule.

One group of two processes runs all that two are needed for, because each of them loads Lightning, which takes seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import lazily
from processes import on_processes

from penstock.errors import UsageError

lightnings = lazily("integrations.lightnings")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*LightningCLI.*"),
]

Case = dict[str, Any]


def run(
    folder: str, case: Case, strategy: Any = "auto", callbacks: Any = (), devices: int | None = None
) -> dict[str, Any]:
    lightnings.pl.seed_everything(0, verbose=False)
    seen, module = lightnings.Losses(), lightnings.Net(**case.get("net", {}))
    runner = lightnings.trainer(
        folder,
        devices=devices or (1 if strategy == "auto" else 2),
        strategy=strategy,
        callbacks=[seen, *callbacks],
        enable_checkpointing=any(isinstance(each, lightnings.ModelCheckpoint) for each in callbacks),
        **case.get("trainer", {}),
    )
    data = lightnings.loader(case.get("rows", 10), **case.get("data", {}))
    runner.fit(module, data, lightnings.loader(7, 1), ckpt_path=case.get("resume"))
    runner.save_checkpoint(f"{folder}/last.ckpt")
    predicted = runner.predict(module, lightnings.loader(7, 1))
    if strategy == "auto":
        state = dict(module.state_dict())
    else:
        state = {name.removeprefix("module."): value for name, value in strategy.pipe.full_state_dict().items()}
    return {
        "losses": seen.losses,
        "epochs": seen.epochs,
        "heard": module.heard,
        "state": state,
        "predicted": torch.cat(predicted),
    }


def pipelined(folder: str) -> list[dict[str, Any]]:
    return [
        run(f"{folder}/{number}", case, lightnings.PipelineStrategy(**case["pipeline"]))
        for number, case in enumerate(CASES)
    ]


def on_two(folder: str) -> dict[str, Any]:
    lightnings.as_torchrun()
    return {each.__name__: each(f"{folder}/{each.__name__}") for each in (pipelined, resumed, watched_pipeline)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Where they wrote, and what each of two processes found; `plain` there is a run without a pipeline."""
    folder = tmp_path_factory.mktemp("two")
    run(str(folder / "plain"), {})
    return folder, on_processes(2, on_two, str(folder), limit=300, loading=["integrations.lightnings"])


def same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)


CASES: list[Case] = [
    {"pipeline": {"microbatches": 2}},
    {
        "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        "net": {"scheduled": True},
        "data": {"shuffle": True},
        "pipeline": {"microbatches": 4, "schedule": "zb-v"},
    },
]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_losses_logs_weights_and_checkpoints_are_those_of_a_trainer_without_a_pipeline(two: Any) -> None:
    folder, ranks = two
    for number, case in enumerate(CASES):
        plain = run(str(folder / f"plain{number}"), case)
        for told in ranks:
            same(told["pipelined"][number], plain)
        files = [folder / "pipelined" / str(number), folder / f"plain{number}"]
        ours, theirs = (torch.load(file / "last.ckpt", weights_only=False) for file in files)
        assert set(ours) - set(theirs) == {"penstock"}
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-10, atol=1e-12)
        loaded = lightnings.Net.load_from_checkpoint(files[0] / "last.ckpt", weights_only=False)
        torch.testing.assert_close(dict(loaded.state_dict()), plain["state"], rtol=1e-10, atol=1e-12)


# -- checkpoints

DROPPED: Case = {"net": {"dropout": 0.3, "scheduled": True}}


def resumed(folder: str) -> Any:
    """For each kind of checkpoint: a run of four epochs, and one that is resumed after two."""
    found = []
    for kind in (None, lightnings.PipelineCheckpointIO):
        place = f"{folder}/{kind and kind.__name__}"

        def strategy(kind: Any = kind) -> Any:
            return lightnings.PipelineStrategy(microbatches=2, checkpoint_io=kind and kind())

        whole = run(f"{place}/whole", {**DROPPED, "trainer": {"max_epochs": 4}}, strategy())
        run(f"{place}/half", DROPPED, strategy())
        later = {**DROPPED, "trainer": {"max_epochs": 4}, "resume": f"{place}/half/last.ckpt"}
        found.append((whole, run(f"{place}/rest", later, strategy())))
    other = {"trainer": {"max_epochs": 4}, "resume": f"{folder}/../plain/last.ckpt"}
    found.append((run(f"{folder}/other", other, lightnings.PipelineStrategy(microbatches=4)), None))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_resumes_to_the_bit_and_from_a_trainer_without_a_pipeline(two: Any) -> None:
    folder, ranks = two
    on = run(str(folder / "on"), {"trainer": {"max_epochs": 4}, "resume": str(folder / "plain/last.ckpt")})
    *pairs, (other, _) = ranks[1]["resumed"]
    for whole, rest in pairs:
        assert rest["losses"] == whole["losses"][6:]
        for name, value in whole["state"].items():
            assert torch.equal(value, rest["state"][name]), name
    same(other, on)
    assert (folder / "resumed/PipelineCheckpointIO/half/last.ckpt/manifest.json").is_file()


def watched(folder: str, strategy: Any = "auto") -> tuple[dict[str, Any], str, float]:
    """Stopped early, with the best checkpoint of several kept."""
    keeper = lightnings.ModelCheckpoint(f"{folder}/kept", monitor="val_loss", save_top_k=1, filename="{epoch}")
    stopper = lightnings.EarlyStopping("val_loss", patience=1, min_delta=0.1)
    found = run(folder, {"trainer": {"max_epochs": 6}}, strategy, [keeper, stopper])
    assert keeper.best_model_score is not None
    return found, Path(keeper.best_model_path).name, keeper.best_model_score.item()


def watched_pipeline(folder: str) -> Any:
    found = watched(folder, lightnings.PipelineStrategy(microbatches=2))
    manual = lightnings.Net()
    manual.automatic_optimization = False
    by_hand = lightnings.trainer(
        folder, devices=2, gradient_clip_val=None, strategy=lightnings.PipelineStrategy(microbatches=2)
    )
    with pytest.raises(UsageError, match="automatic_optimization"):
        by_hand.fit(manual, lightnings.loader(4))
    with pytest.raises(UsageError, match="microbatches=8"):
        lightnings.trainer(folder, devices=2, strategy=lightnings.PipelineStrategy()).fit(
            lightnings.Net(), lightnings.loader(4)
        )
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_callbacks_see_the_same_numbers_and_decide_alike(two: Any) -> None:
    folder, ranks = two
    plain, name, score = watched(str(folder / "watched"))
    for found, best, best_score in (told["watched_pipeline"] for told in ranks):
        same(found, plain)
        assert (best, best_score) == (name, pytest.approx(score, rel=1e-10))
    kept = (folder / "watched_pipeline/kept").iterdir()
    assert [path.name for path in kept] == [name]


# -- replicas


def replicated(folder: str) -> Any:
    lightnings.as_torchrun()
    case = {"rows": 8, "data": {"batch": 2}, "trainer": {"limit_val_batches": 0}}
    return run(folder, case, lightnings.PipelineStrategy(microbatches=2, replicas=2), devices=4)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_replicas_train_as_one_process_on_batches_twice_as_large(tmp_path: Path) -> None:
    ranks = on_processes(4, replicated, str(tmp_path / "replicas"), loading=["integrations.lightnings"])
    case = {"rows": 8, "data": {"sampled": True}, "trainer": {"limit_val_batches": 0}}
    plain = run(str(tmp_path / "plain"), case)
    for found in ranks:
        same({**found, "predicted": 0}, {**plain, "predicted": 0})  # of which each replica has its own


# -- wrong use


@pytest.mark.parametrize("name", ["model", "loss_fn", "precision", "group", "mesh"])
def test_options_that_follow_from_the_module_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"PipelineStrategy\\({name}=...\\): leave it out"):
        lightnings.PipelineStrategy(microbatches=2, **{name: None})


def test_there_is_no_pipeline_before_the_trainer_has_set_it_up() -> None:
    with pytest.raises(UsageError, match="no pipeline yet"):
        _ = lightnings.PipelineStrategy(microbatches=2).pipe


def test_a_checkpoint_io_needs_its_strategy() -> None:
    with pytest.raises(UsageError, match="PipelineStrategy"):
        lightnings.PipelineCheckpointIO().load_checkpoint("nowhere")
