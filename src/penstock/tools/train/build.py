"""From a configuration to the things that train: model and pipeline.

The same functions serve a rank of a run, a dry run, an evaluation and sampling; what differs is where the ranks live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.processes import Processes
from penstock.errors import ModelError, UsageError
from penstock.model.cut_options import CutOptions
from penstock.model.lazy import Init, is_lazy
from penstock.parallel.mesh import mesh as make_mesh
from penstock.parallel.parallel_options import ParallelOptions
from penstock.pipeline import Pipeline
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.optim.groups import unmatched
from penstock.schedule import Schedule
from penstock.tools.train.config.consistent import stages_of
from penstock.tools.train.config.device import device_of, precision_of
from penstock.tools.train.config.read import checked
from penstock.tools.train.config.settings import GPTOptions, TrainConfig
from penstock.tools.train.config.source import HUGGINGFACE, call_source, is_function
from penstock.tools.train.data.batch import DataBatch, DataBatches
from penstock.tools.train.data.layouts import split_of
from penstock.tools.train.data.tokenizer import open_tokenizer
from penstock.tools.train.data.vocabulary import check_packing, check_vocabulary, vocabulary_of
from penstock.tools.train.loss import StepLoss, build_loss
from penstock.tools.train.models.gpt import build_gpt
from penstock.tools.train.models.huggingface import build_huggingface, tensor_plan_of, values_of
from penstock.tools.train.models.lora import add_adapters, has_adapters
from penstock.tools.train.run.run_folder import RunFolder

Loss = Callable[..., Any]
PRICED_AS = {"sgd": "sgd-momentum", "adamw8bit": "adamw"}  # the optimizer whose memory a cut counts with


def gpt_options(config: TrainConfig) -> GPTOptions:
    """Return the options of the built-in GPT; its vocabulary follows the tokenizer, unless it is set."""
    options = checked(GPTOptions, config.model.options, "model.options")
    if config.data.tokenizer and "vocabulary" not in config.model.options:
        return replace(options, vocabulary=open_tokenizer(config.data.tokenizer, config.data.end).vocabulary)
    return options


def build_model(config: TrainConfig) -> tuple[nn.Module, Loss | None]:
    """Build the model, with adapters where there are to be some; also return its loss, where it brings one of its own.

    Fresh weights are the same on every rank. A model whose weights are in a folder has none yet: `build_pipeline` has
    each rank read its own.
    """
    torch.manual_seed(config.seed)
    model, loss = _plain_model(config)
    return (add_adapters(config, model) if has_adapters(config) else model), loss


def _plain_model(config: TrainConfig) -> tuple[nn.Module, Loss | None]:
    source = config.model.source
    if source == "gpt":
        return build_gpt(gpt_options(config), config.data.sequence), None
    if source.startswith(HUGGINGFACE):
        return build_huggingface(config), None
    if not is_function(source):
        raise UsageError(f'model.source is "{source}"; a function is written "module:function"')
    found = call_source("model.source", source, config.model.options)
    model, loss = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module) or not (loss is None or callable(loss)):
        raise UsageError(
            f"model.source: {source} returned a {type(found).__name__}; return an nn.Module, or (nn.Module, loss)"
        )
    return model, loss


def build_pipeline(
    config: TrainConfig,
    model: nn.Module,
    loss: Loss | None,
    batch: DataBatch,
    *,
    ranks: int | None = None,
    balance: Any = None,
    schedule: Schedule | None = None,
    transport: str | None = None,
    mesh: Any = None,
    values: Init | None = None,
) -> Pipeline:
    """Build the pipeline of a configuration; `batch` shows what the model takes.

    `values` fills a model that was built without any, in the place of the weights in its folder.
    """
    options = config.pipeline
    freeze(model, config.training.freeze)
    replicated = ParallelOptions()
    if mesh is not None:
        window = config.mesh.window if config.mesh.replicate == "fsdp" and config.mesh.replicas > 1 else None
        replicate = config.mesh.replicate if config.mesh.replicas > 1 else None
        plan = tensor_plan_of(config, model) if config.mesh.tp > 1 else None
        replicated = ParallelOptions(replicate=replicate, window=window, tensor_plan=plan)
    step_loss = build_loss(config, model, loss, batch.target is not None)
    wanted: dict[str, Any] = {"balance": balance or options.balance}
    if options.split_at:
        wanted = {"split_at": options.split_at}
    return Pipeline(
        model,
        stages=stages_of(config),
        microbatches=options.microbatches,
        schedule=options.schedule if schedule is None else schedule,
        loss_fn=step_loss,
        loss_options=step_loss.options if isinstance(step_loss, StepLoss) else LossOptions(),
        example=example_of(batch, options.microbatches),
        ranks=ranks,
        mesh=mesh,
        transport=transport,
        recompute=options.recompute,
        devices="auto" if device_of(config) else None,
        precision=precision_of(config),
        timeout=options.timeout,
        seed=config.seed,
        batch_options=split_of(config.data),
        cut_options=CutOptions(optimizer=PRICED_AS.get(config.optimizer.name, config.optimizer.name)),
        parallel_options=replicated,
        init=None if not is_lazy(model) else values or values_of(config, model),
        **wanted,
    )


def build_run(config: TrainConfig, folder: RunFolder, data: DataBatches, processes: bool) -> Pipeline:
    """Build the pipeline of a run: cut as it was when it began, where that was measured, and checked with its data."""
    model, loss = build_model(config)
    check_vocabulary(config, model, data)
    stages, balance, replicas = stages_of(config), None, config.mesh.replicas
    before = folder.cut()
    # Another cut would add up in another order.
    if before is not None and before["stages"] == stages and config.pipeline.balance in ("time", "memory"):
        balance = before["counts"]
    try:
        pipe = build_pipeline(
            config,
            model,
            loss,
            data.first().share(0, replicas),
            ranks=config.pipeline.ranks,
            balance=balance,
            transport=None if processes else "threads",
            mesh=_mesh(config),
        )
    except ModelError as error:
        if balance is None or not str(error).startswith("balance="):
            raise
        raise folder.wrong_cut(str(error)) from error
    if balance is None and pipe.deployment.staged.cuts and Processes(pipe, "penstock train").first:
        folder.keep_cut(stages, list(pipe.deployment.staged.balance))
    if config.data.packing:
        check_packing(pipe, config, vocabulary_of(model) or 256)
    return pipe


def _mesh(config: TrainConfig) -> Any:
    """Return the axes of the processes; None where there is no other than the pipeline's."""
    replicas, tp = config.mesh.replicas, config.mesh.tp
    if replicas * tp == 1:
        return None
    return make_mesh(
        pp=config.pipeline.ranks, dp=replicas, tp=tp, inner=config.mesh.inner, device=device_of(config) or "cpu"
    )


def example_of(batch: DataBatch, microbatches: int) -> tuple[Any, ...] | dict[str, Any]:
    """Return about the first microbatch, which a cut looks at the model with."""

    def piece(value: Any) -> Any:
        rows = max(1, len(value) // microbatches) if isinstance(value, Tensor) and value.dim() else 0
        return value[:rows] if rows else value

    if batch.kwargs:
        return {name: piece(value) for name, value in batch.kwargs.items()}
    return tuple(piece(value) for value in batch.args)


TRAIN = "!"  # begins a pattern of parameters that are trained after all


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name a pattern matches; of several patterns that match, the last one counts."""
    if not patterns:
        return
    every = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in every]
    for pattern in patterns:
        plain = pattern.removeprefix(TRAIN)
        if not any(fnmatchcase(name, plain) for name in names):
            raise UsageError(f"training.freeze: {unmatched(plain, names, {})}")
    for name, parameter in every:
        last = next((each for each in reversed(patterns) if fnmatchcase(name, each.removeprefix(TRAIN))), None)
        if last is not None:
            parameter.requires_grad_(last.startswith(TRAIN))
    if not any(parameter.requires_grad for _, parameter in every):
        raise UsageError(
            f"training.freeze: {', '.join(patterns)} freezes all {len(names)} parameters of the model, so that nothing "
            f'is left to train; add a pattern of those to train, such as "!{names[-1]}"'
        )
