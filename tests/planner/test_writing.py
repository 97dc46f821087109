"""A plan as files: what is written is a configuration that the training command takes, and says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiers import mostly_slow
from torch.nn import functional as F

import penstock
from penstock.errors import UsageError
from penstock.planner.cluster import Cluster
from penstock.planner.layout import MeshLayout
from penstock.planner.plan import config_for
from penstock.planner.plans import Plan
from penstock.planner.writing import config_of, priced_settings, to_toml, write_plan
from penstock.schedule import Schedule
from penstock.tools.train.config.consistent import check_consistent
from penstock.tools.train.config.read import load_config
from penstock.tools.train.config.settings import GPTOptions, TrainConfig
from penstock.tools.train.models.gpt import build_gpt

OPTIONS = {"layers": 6, "width": 32, "heads": 4, "vocabulary": 300}


def planned(layout: MeshLayout, **more: object) -> Plan:
    cluster = Cluster(hosts=1, devices=layout.world)
    return penstock.plan("gpt", cluster, batch=16, sequence=16, options=OPTIONS, layout=layout, **more).best


LAYOUTS = [MeshLayout(2), MeshLayout(2, 2), MeshLayout(2, 2, sharded=True), MeshLayout(1, 2, 2), MeshLayout(2, tp=2)]


@pytest.mark.parametrize(
    "layout",
    mostly_slow(LAYOUTS, *LAYOUTS[2::2]),
)
def test_a_written_plan_is_read_back_as_the_same_configuration(layout: MeshLayout, tmp_path: Path) -> None:
    plan = planned(layout, schedules=["1f1b", "zb-v"])
    schedule = write_plan(plan, tmp_path / "plan.toml")
    read = load_config(tmp_path / "plan.toml")
    check_consistent(read, "plan.toml")
    assert read.prediction == {"of": priced_settings(read), **plan.figures}
    assert replace(read, prediction={}) == config_of(plan, str(schedule) if plan.family == "searched" else None)
    assert (read.pipeline.ranks, read.mesh.replicas, read.mesh.tp) == (layout.pp, layout.dp, layout.tp)
    assert (read.mesh.replicate == "fsdp") == layout.sharded
    assert Schedule.load(schedule) == plan.schedule


@pytest.mark.slow
def test_a_plan_with_pipelines_inside_hosts_says_so_in_its_configuration(tmp_path: Path) -> None:
    write_plan(planned(MeshLayout(2, 2, inner="pp")), tmp_path / "plan.toml")
    assert load_config(tmp_path / "plan.toml").mesh.inner == "pp"
    write_plan(planned(MeshLayout(2, 2)), tmp_path / "plan.toml")
    assert load_config(tmp_path / "plan.toml").mesh.inner == "dp"


def test_a_folder_that_does_not_exist_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        write_plan(planned(MeshLayout(2)), tmp_path / "none" / "plan.toml")
    assert not list(tmp_path.iterdir())


def test_toml_holds_texts_lists_tables_and_numbers_as_they_are() -> None:
    config = config_for("gpt", batch=8, options={"layers": 3, "dropout": 0.25, "name": 'a "quoted" \\ text'})
    import tomllib

    document = tomllib.loads(to_toml(config))
    assert document == {
        "data": {"batch": 8},
        "model": {"options": {"layers": 3, "dropout": 0.25, "name": 'a "quoted" \\ text'}},
    }
    assert to_toml(TrainConfig()) == "\n"


def test_context_parallelism_is_priced_and_not_written(tmp_path: Path) -> None:
    plan = planned(MeshLayout(2, cp=2))
    with pytest.raises(UsageError, match="an axis cp, which Penstock does not run"):
        write_plan(plan, tmp_path / "plan.toml")


@pytest.mark.parametrize("schedule", mostly_slow(["1f1b", "interleaved-zb", "zb-v"], "zb-v"))
def test_a_pipeline_takes_a_plan_and_trains_as_the_plain_model(schedule: str) -> None:
    plan = planned(MeshLayout(2), schedules=[schedule])
    assert plan.schedule.stages == 2 if schedule == "1f1b" else plan.schedule.stages >= 4
    torch.manual_seed(0)
    model = build_gpt(GPTOptions(**OPTIONS), 16).double()
    plain = build_gpt(GPTOptions(**OPTIONS), 16).double()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(300, (16, 16))

    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())

    with penstock.Pipeline(model, plan=plan, loss_fn=loss) as pipe:
        assert pipe.schedule == plan.schedule
        result = pipe.step(ids, target=ids)
    expected = loss(plain(ids), ids)
    expected.backward()
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_a_pipeline_refuses_what_a_plan_says_already() -> None:
    model = build_gpt(GPTOptions(**OPTIONS), 16)
    with pytest.raises(UsageError, match="plan= says what stages= would"):
        penstock.Pipeline(model, plan=planned(MeshLayout(2)), stages=2, loss_fn=F.mse_loss)
    with pytest.raises(UsageError, match="pass a plan of penstock"):
        penstock.Pipeline(model, plan="best", loss_fn=F.mse_loss)
