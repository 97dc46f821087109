"""From a configuration to the things that train: model, pipeline, optimizer, learning rate.

The same functions serve a rank of a run, a dry run, an evaluation and sampling; what differs is where the ranks live.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from penstock.errors import UsageError
from penstock.model.cut_options import CutOptions
from penstock.model.lazy import Init, is_lazy
from penstock.parallel.parallel_options import ParallelOptions
from penstock.pipeline import Pipeline
from penstock.runtime.loss.loss_options import LossOptions
from penstock.train.config.consistent import stages_of
from penstock.train.config.read import checked
from penstock.train.config.settings import GPTOptions, TrainConfig
from penstock.train.config.source import HUGGINGFACE, call_source, is_function
from penstock.train.data.batch import DataBatch
from penstock.train.data.layouts import split_of
from penstock.train.data.tokenizer import open_tokenizer
from penstock.train.gpt import build_gpt
from penstock.train.huggingface import build_huggingface, tensor_plan_of, values_of
from penstock.train.lora import add_adapters, has_adapters
from penstock.train.loss import StepLoss, build_loss

Loss = Callable[..., Any]


def gpt_options(config: TrainConfig) -> GPTOptions:
    """The options of the built-in GPT; its vocabulary follows the tokenizer, unless it is set."""
    options = checked(GPTOptions, config.model.options, "model.options")
    if config.data.tokenizer and "vocabulary" not in config.model.options:
        return replace(options, vocabulary=open_tokenizer(config.data.tokenizer, config.data.end).vocabulary)
    return options


def build_model(config: TrainConfig) -> tuple[nn.Module, Loss | None]:
    """The model, with adapters if there are to be some, and its loss where it brings one of its own.

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
    transport: str | None = None,
    mesh: Any = None,
    values: Init | None = None,
) -> Pipeline:
    """The pipeline of a configuration; `batch` shows what the model takes.

    `values` fills a model that was built without any, in the place of the weights in its folder.
    """
    options = config.pipeline
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
        schedule=options.schedule,
        loss_fn=step_loss,
        loss_options=step_loss.options if isinstance(step_loss, StepLoss) else LossOptions(),
        example=example_of(batch, options.microbatches),
        ranks=ranks,
        mesh=mesh,
        transport=transport,
        recompute=options.recompute,
        precision=options.precision,
        timeout=options.timeout,
        seed=config.seed,
        batch_options=split_of(config.data),
        cut_options=CutOptions(optimizer={"sgd": "sgd-momentum"}.get(config.optimizer.name, config.optimizer.name)),
        parallel_options=replicated,
        init=None if not is_lazy(model) else values or values_of(config, model),
        **wanted,
    )


def example_of(batch: DataBatch, microbatches: int) -> tuple[Any, ...] | dict[str, Any]:
    """The first microbatch, near enough: what the model is looked at with."""

    def piece(value: Any) -> Any:
        rows = max(1, len(value) // microbatches) if isinstance(value, Tensor) and value.dim() else 0
        return value[:rows] if rows else value

    if batch.kwargs:
        return {name: piece(value) for name, value in batch.kwargs.items()}
    return tuple(piece(value) for value in batch.args)


def build_optimizer(config: TrainConfig, pipe: Pipeline) -> torch.optim.Optimizer:
    """Over the parameters that this process owns: matrices with weight decay, vectors without."""
    options = config.optimizer
    vectors = any(parameter.dim() < 2 for part in pipe.deployment.split.parts for parameter in part.module.parameters())
    groups = pipe.parameter_groups({_is_vector: {"weight_decay": 0.0}} if vectors else {})
    common: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.name == "sgd":
        return torch.optim.SGD(groups, momentum=options.momentum, **common)
    kind = torch.optim.AdamW if options.name == "adamw" else torch.optim.Adam
    return kind(groups, betas=(options.betas[0], options.betas[1]), eps=options.eps, **common)


def _is_vector(name: str, parameter: Tensor) -> bool:
    return parameter.dim() < 2


def build_rate(config: TrainConfig, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The learning rate over time, as torch's own scheduler."""
    return LambdaLR(optimizer, lambda step: rate_at(config, step))


def follow_config(config: TrainConfig, optimizer: torch.optim.Optimizer, rate: LambdaLR, options: list[Any]) -> None:
    """After a load: options are what the configuration says now, `options` of each group, and not what was saved.

    Where nothing was changed, these are the same numbers.
    """
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)
        group["lr"] = group["initial_lr"] * rate_at(config, rate.last_epoch)
    rate.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    rate._last_lr = [group["lr"] for group in optimizer.param_groups]


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group was told, without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def rate_at(config: TrainConfig, step: int) -> float:
    """The share of `optimizer.lr` in a step, counted from 0: up in `warmup` steps, then down to `final` at the last."""
    options = config.optimizer
    if step < options.warmup:
        return (step + 1) / options.warmup
    if options.decay == "constant":
        return 1.0
    way = min(1.0, (step - options.warmup) / max(1, config.training.steps - 1 - options.warmup))
    fallen = way if options.decay == "linear" else (1 - math.cos(math.pi * way)) / 2
    return 1.0 - (1.0 - options.final) * fallen
