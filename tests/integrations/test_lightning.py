"""PipelineStrategy on two processes, against Lightning's own Trainer on one, with the same LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from integrations.lightnings import Losses, Net, as_torchrun, loader, trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from processes import on_processes

from penstock.errors import UsageError
from penstock.integrations.lightning import PipelineCheckpointIO, PipelineStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*LightningCLI.*"),
]

Case = dict[str, Any]


def run(
    folder: str, case: Case, strategy: Any = "auto", callbacks: Any = (), devices: int | None = None
) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    seen, module = Losses(), Net(**case.get("net", {}))
    runner = trainer(
        folder,
        devices=devices or (1 if strategy == "auto" else 2),
        strategy=strategy,
        callbacks=[seen, *callbacks],
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **case.get("trainer", {}),
    )
    data = loader(case.get("rows", 10), **case.get("data", {}))
    runner.fit(module, data, loader(7, 1), ckpt_path=case.get("resume"))
    runner.save_checkpoint(f"{folder}/last.ckpt")
    predicted = runner.predict(module, loader(7, 1))
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


def pipelined(folder: str, cases: list[Case]) -> list[dict[str, Any]]:
    as_torchrun()
    return [run(f"{folder}/{number}", case, PipelineStrategy(**case["pipeline"])) for number, case in enumerate(cases)]


def same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_losses_logs_weights_and_checkpoints_are_those_of_a_trainer_without_a_pipeline(tmp_path: Path) -> None:
    cases: list[Case] = [
        {"pipeline": {"microbatches": 2}},
        {
            "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
            "net": {"scheduled": True},
            "data": {"shuffle": True},
            "pipeline": {"microbatches": 4, "schedule": "zb-v"},
        },
    ]
    ranks = on_processes(2, pipelined, str(tmp_path / "pipelined"), cases)
    for number, case in enumerate(cases):
        plain = run(str(tmp_path / f"plain{number}"), case)
        for found in ranks:
            same(found[number], plain)
        files = [tmp_path / "pipelined" / str(number), tmp_path / f"plain{number}"]
        ours, theirs = (torch.load(file / "last.ckpt", weights_only=False) for file in files)
        assert set(ours) - set(theirs) == {"penstock"}
        for key in ("state_dict", "optimizer_states", "lr_schedulers"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-10, atol=1e-12)
        loaded = Net.load_from_checkpoint(files[0] / "last.ckpt", weights_only=False)
        torch.testing.assert_close(dict(loaded.state_dict()), plain["state"], rtol=1e-10, atol=1e-12)


# -- checkpoints

DROPPED: Case = {"net": {"dropout": 0.3, "scheduled": True}}


def resumed(folder: str) -> Any:
    """For each kind of checkpoint: a run of four epochs, and one that is resumed after two."""
    as_torchrun()
    found = []
    for kind in (None, PipelineCheckpointIO):
        place = f"{folder}/{kind and kind.__name__}"

        def strategy(kind: Any = kind) -> PipelineStrategy:
            return PipelineStrategy(microbatches=2, checkpoint_io=kind and kind())

        whole = run(f"{place}/whole", {**DROPPED, "trainer": {"max_epochs": 4}}, strategy())
        run(f"{place}/half", DROPPED, strategy())
        later = {**DROPPED, "trainer": {"max_epochs": 4}, "resume": f"{place}/half/last.ckpt"}
        found.append((whole, run(f"{place}/rest", later, strategy())))
    other = {"trainer": {"max_epochs": 4}, "resume": f"{folder}/../plain/last.ckpt"}
    found.append((run(f"{folder}/other", other, PipelineStrategy(microbatches=4)), None))
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_resumes_to_the_bit_and_from_a_trainer_without_a_pipeline(tmp_path: Path) -> None:
    run(str(tmp_path / "plain"), {})
    on = run(str(tmp_path / "on"), {"trainer": {"max_epochs": 4}, "resume": str(tmp_path / "plain/last.ckpt")})
    *pairs, (other, _) = on_processes(2, resumed, str(tmp_path / "pipelined"))[1]
    for whole, rest in pairs:
        assert rest["losses"] == whole["losses"][6:]
        for name, value in whole["state"].items():
            assert torch.equal(value, rest["state"][name]), name
    same(other, on)
    assert (tmp_path / "pipelined/PipelineCheckpointIO/half/last.ckpt/manifest.json").is_file()


def watched(folder: str, strategy: Any = "auto") -> tuple[dict[str, Any], str, float]:
    """Stopped early, with the best checkpoint of several kept."""
    keeper = ModelCheckpoint(f"{folder}/kept", monitor="val_loss", save_top_k=1, filename="{epoch}")
    stopper = EarlyStopping("val_loss", patience=1, min_delta=0.1)
    found = run(folder, {"trainer": {"max_epochs": 6}}, strategy, [keeper, stopper])
    assert keeper.best_model_score is not None
    return found, Path(keeper.best_model_path).name, keeper.best_model_score.item()


def watched_pipeline(folder: str) -> Any:
    as_torchrun()
    found = watched(folder, PipelineStrategy(microbatches=2))
    manual = Net()
    manual.automatic_optimization = False
    by_hand = trainer(folder, devices=2, gradient_clip_val=None, strategy=PipelineStrategy(microbatches=2))
    with pytest.raises(UsageError, match="automatic_optimization"):
        by_hand.fit(manual, loader(4))
    with pytest.raises(UsageError, match="microbatches=8"):
        trainer(folder, devices=2, strategy=PipelineStrategy()).fit(Net(), loader(4))
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_callbacks_see_the_same_numbers_and_decide_alike(tmp_path: Path) -> None:
    ranks = on_processes(2, watched_pipeline, str(tmp_path / "run"))
    plain, name, score = watched(str(tmp_path / "plain"))
    for found, best, best_score in ranks:
        same(found, plain)
        assert (best, best_score) == (name, pytest.approx(score, rel=1e-10))
    kept = (tmp_path / "run/kept").iterdir()
    assert [path.name for path in kept] == [name]


# -- replicas


def replicated(folder: str) -> Any:
    as_torchrun()
    case = {"rows": 8, "data": {"batch": 2}, "trainer": {"limit_val_batches": 0}}
    return run(folder, case, PipelineStrategy(microbatches=2, replicas=2), devices=4)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_replicas_train_as_one_process_on_batches_twice_as_large(tmp_path: Path) -> None:
    ranks = on_processes(4, replicated, str(tmp_path / "replicas"))
    case = {"rows": 8, "data": {"sampled": True}, "trainer": {"limit_val_batches": 0}}
    plain = run(str(tmp_path / "plain"), case)
    for found in ranks:
        same({**found, "predicted": 0}, {**plain, "predicted": 0})  # of which each replica has its own


# -- wrong use


@pytest.mark.parametrize("name", ["model", "loss_fn", "precision", "group", "mesh"])
def test_options_that_follow_from_the_module_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"PipelineStrategy\\({name}=...\\): leave it out"):
        PipelineStrategy(microbatches=2, **{name: None})


def test_there_is_no_pipeline_before_the_trainer_has_set_it_up() -> None:
    with pytest.raises(UsageError, match="no pipeline yet"):
        _ = PipelineStrategy(microbatches=2).pipe


def test_a_checkpoint_io_needs_its_strategy() -> None:
    with pytest.raises(UsageError, match="PipelineStrategy"):
        PipelineCheckpointIO().load_checkpoint("nowhere")
