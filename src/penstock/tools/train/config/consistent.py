"""Whether the keys of a configuration go together: what no key's own type can express."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, UsageError
from penstock.schedule import Schedule, family
from penstock.tools.train.config.read import checked
from penstock.tools.train.config.settings import GPTOptions, TrainConfig
from penstock.tools.train.config.source import is_function

MOST_TOKENS = 2**28  # four times as many as anybody trains on in a step


def check_consistent(config: TrainConfig, origin: str = "the configuration") -> None:
    """Raise UsageError with everything that does not go together."""
    cut = list(_cut(config))
    faults = [*_rows(config), *cut, *_numbers(config), *_overlap(config), *_data(config)]
    refuse_all([*faults, *_model(config, None if cut else stages_of(config))], origin)


def check_model(config: TrainConfig, origin: str = "the configuration") -> None:
    """Raise UsageError with what does not go together in the model itself, however it is run."""
    refuse_all([*_model(config, None)], origin)


def refuse_all(faults: list[str], origin: str) -> None:
    """Raise UsageError with all faults, if there are any."""
    if faults:
        raise UsageError("\n  ".join([f"{origin}:", *faults]) if len(faults) > 1 else f"{origin}: {faults[0]}")


def stages_of(config: TrainConfig) -> int:
    """Return how many stages there are to be: as asked for, or as many as the schedule's family has by itself."""
    pipeline = config.pipeline
    if pipeline.stages is not None:
        return pipeline.stages
    if isinstance(pipeline.balance, list):
        return len(pipeline.balance)
    if pipeline.split_at:
        return len(pipeline.split_at) + 1
    if is_schedule_file(pipeline.schedule):
        return Schedule.load(Path(pipeline.schedule)).stages
    return pipeline.ranks * family(pipeline.schedule).stages_per_rank


def processes_of(config: TrainConfig) -> int:
    """Count the processes of a run: the ranks of a pipeline, for each replica and each part of its tensors."""
    return config.pipeline.ranks * config.mesh.replicas * config.mesh.tp


def is_schedule_file(schedule: str) -> bool:
    """Return whether pipeline.schedule names a file, and not a family."""
    return schedule.lower().endswith((".csv", ".json"))


def _rows(config: TrainConfig) -> Iterator[str]:
    batch, passes, slices = config.data.batch, config.training.accumulate, config.pipeline.microbatches
    shares = passes * config.mesh.replicas
    tokens = batch * config.data.sequence
    if tokens > MOST_TOKENS:
        yield f"a step of {tokens:,} tokens (data.batch x data.sequence) fills the memory; give {MOST_TOKENS:,} at most"
    by = "training.accumulate" + (" x mesh.replicas" if config.mesh.replicas > 1 else "")
    if batch % shares:
        yield (
            f"data.batch is {batch}, which {shares} shares ({by}) cannot divide evenly; "
            f"{batch // shares * shares or shares} or {(batch // shares + 1) * shares} would do"
        )
    elif batch // shares < slices:
        yield (
            f"data.batch / ({by}) = {batch // shares} rows cannot fill {slices} microbatches "
            f"(pipeline.microbatches); {slices * shares} rows would, or at most {batch // shares} microbatches"
        )
    for name in ("replicas", "tp"):
        if getattr(config.mesh, name) > 1 and config.pipeline.workers == "threads":
            yield f'mesh.{name} are processes; set pipeline.workers to "processes", or mesh.{name} to 1'
    if config.launch.elastic and config.pipeline.workers == "threads":
        yield 'launch.elastic is about processes under torchrun; set pipeline.workers to "processes", or leave it out'
    if config.mesh.tensor_plan is not None and config.mesh.tp == 1:
        yield "mesh.tensor_plan says how tensors are spread over mesh.tp processes, and mesh.tp is 1"
    if config.lora.alpha is not None and not config.lora.rank:
        yield "lora.alpha is for new adapters; set lora.rank, such as 8"


def _cut(config: TrainConfig) -> Iterator[str]:
    pipeline = config.pipeline
    try:
        if is_schedule_file(pipeline.schedule):
            loaded = Schedule.load(Path(pipeline.schedule))
            if (loaded.ranks, loaded.microbatches) != (pipeline.ranks, pipeline.microbatches):
                yield (
                    f"pipeline.schedule is for {loaded.ranks} ranks and {loaded.microbatches} microbatches; "
                    f"pipeline.ranks is {pipeline.ranks}, pipeline.microbatches {pipeline.microbatches}"
                )
        elif not family(pipeline.schedule).trains:
            yield "pipeline.schedule is forward-only, which has no backward and trains nothing"
    except FileNotFoundError:
        yield f"pipeline.schedule: there is no file {pipeline.schedule}"
        return
    except PenstockError as error:
        yield f"pipeline.schedule: {error}"
        return
    stages = stages_of(config)
    if isinstance(pipeline.balance, list) and len(pipeline.balance) != stages:
        yield f"pipeline.balance has {len(pipeline.balance)} counts for {stages} stages (pipeline.stages)"
    if stages % pipeline.ranks:
        per_rank = max(1, -(-stages // pipeline.ranks))
        yield (
            f"{stages} stages (pipeline.stages) cannot fill {pipeline.ranks} ranks (pipeline.ranks) evenly; "
            f"{per_rank * pipeline.ranks} stages would"
        )


def _numbers(config: TrainConfig) -> Iterator[str]:
    yield from tuning_faults(config)
    processes = processes_of(config)
    odd = [rank for rank in config.logging.ranks if not 0 <= rank < processes]
    if odd:
        yield f"logging.ranks has {odd[0]}; the ranks are 0 to {processes - 1}"
    if not config.output.strip():
        yield "output is empty; name a folder, such as runs/mine"
    if not config.data.source:
        yield 'data.source is empty; name files, or "stdlib"'


def _overlap(config: TrainConfig) -> Iterator[str]:
    """Find what ends steps on all ranks together, so that they cannot overlap."""
    if not config.pipeline.overlap_steps:
        return
    apart = "leave one of them out"
    if config.training.accumulate > 1:
        yield f"pipeline.overlap_steps is for one pass per step, and training.accumulate is more; {apart}"
    if config.training.ema is not None:
        yield f"pipeline.overlap_steps makes updates that may be taken back, which training.ema cannot follow; {apart}"
    if config.pipeline.precision == "fp16":
        yield 'pipeline.overlap_steps does not go with the loss scaling of fp16; set pipeline.precision to "bf16"'
    if config.mesh.tp > 1:
        yield f"pipeline.overlap_steps is for parameters that a process has all of, and mesh.tp is more than 1; {apart}"
    if config.mesh.replicas > 1 and config.mesh.replicate == "fsdp":
        yield 'pipeline.overlap_steps does not go with sharded parameters; set mesh.replicate to "ddp"'


def _data(config: TrainConfig) -> Iterator[str]:
    data, loss = config.data, config.loss
    if data.packing and data.max_tokens is not None:
        yield "data.max_tokens is for padded rows, and data.packing leaves no padding to avoid; leave one of them out"
    if data.max_tokens is not None and data.max_tokens < data.sequence:
        yield (
            f"data.max_tokens is {data.max_tokens}, fewer than the {data.sequence} tokens that one row may have "
            f"(data.sequence)"
        )
    if data.max_tokens is not None and config.model.source == "gpt":
        yield "data.max_tokens needs a model that takes attention_mask; with the built-in GPT, set data.packing instead"
    if data.tokenizer and data.tokens != "bytes":
        yield f"data.tokens is {data.tokens}, numbers that need no data.tokenizer; leave one of them out"
    if loss.options and not loss.function:
        yield "loss.options are for loss.function, which is not set"
    if loss.function and not is_function(loss.function):
        yield f'loss.function is "{loss.function}"; a function is written "module:function"'
    builtin = [name for name in ("label_smoothing", "router") if getattr(loss, name)]
    if loss.function and builtin:
        yield f"loss.{builtin[0]} is for the built-in loss, not for loss.function; leave one of them out"


def _model(config: TrainConfig, stages: int | None) -> Iterator[str]:
    if config.model.source == "gpt":
        try:
            options = checked(GPTOptions, config.model.options, "model.options")
        except UsageError as error:
            yield str(error)
            return
        if options.width % options.heads:
            yield f"model.options.width is {options.width}, which {options.heads} heads cannot share evenly"
        layers = options.layers + 2
        if stages is not None and stages > layers:
            yield (
                f"{stages} stages cannot be cut from {layers} pieces (embedding, {options.layers} layers, head); "
                f"model.options.layers={stages - 2} would do, or fewer ranks or stages"
            )
        if config.data.tokens not in ("bytes", "uint8") and options.vocabulary <= 256 and not config.data.tokenizer:
            yield (
                f"data.tokens is {config.data.tokens}, but the model knows {options.vocabulary} tokens; "
                f"set model.options.vocabulary"
            )
        if options.context is not None and options.context < config.data.sequence:
            yield (
                f"model.options.context is {options.context}, shorter than data.sequence, {config.data.sequence}; "
                f"leave it out, or make it as long"
            )
    elif ":" not in config.model.source:
        yield (
            f'model.source is "{config.model.source}"; it takes "gpt", "module:function", or "huggingface:NAME" such '
            f'as "huggingface:llama"'
        )


ADAM, SGD = ("lr", "weight_decay", "betas", "eps"), ("lr", "weight_decay", "momentum")


def tuning_faults(config: TrainConfig) -> Iterator[str]:
    """Describe each fault in these keys together."""
    yield from _optimizer(config)
    for pattern, options in config.optimizer.groups.items():
        yield from _group(f'optimizer.groups."{pattern}"', options, config.optimizer.name)
    if config.training.ema == 1:
        yield "training.ema is 1, with which the average would never change; give a decay below 1, such as 0.999"
    if config.evaluation.patience is not None and not config.evaluation.every:
        yield "evaluation.patience counts evaluations, and evaluation.every is 0: none; set the steps between them"
    callback = config.logging.callback
    if callback is not None and not is_function(callback):
        yield f'logging.callback is "{callback}"; a function is written "module:function", such as "my_run:seen"'
    if config.logging.wandb == "off" and config.logging.wandb_options:
        yield 'logging.wandb_options are given, but logging.wandb is "off"; set it to "online" or "offline"'


def _optimizer(config: TrainConfig) -> Iterator[str]:
    options = config.optimizer
    if not _are_betas(options.betas):
        yield f"optimizer.betas is {options.betas}; it takes two numbers from 0 to below 1, such as [0.9, 0.95]"
    if options.momentum and options.name != "sgd":
        yield f"optimizer.momentum is for sgd; {options.name} has optimizer.betas"
    if options.name == "adamw8bit":
        if options.implementation != "default":
            yield (
                f"optimizer.implementation={options.implementation} is for torch's optimizers; adamw8bit has one "
                f"implementation, the default"
            )
        if config.mesh.replicas > 1 and config.mesh.replicate == "fsdp":
            yield 'optimizer.name=adamw8bit does not know sharded parameters; choose mesh.replicate="ddp", or "adamw"'


def _are_betas(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(beta) and beta < 1 for beta in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _group(path: str, options: Any, name: str) -> Iterator[str]:
    known = SGD if name == "sgd" else ADAM
    if not isinstance(options, Mapping) or not options:
        yield f"{path} is {options!r}; it takes a table of options, such as {{lr = 1e-4}}"
        return
    for option, value in options.items():
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"{path} has {option}; {hint}{name} has {', '.join(known)}"
        elif option == "betas":
            if not _are_betas(value):
                yield f"{path}.betas is {value}; it takes two numbers from 0 to below 1, such as [0.9, 0.95]"
        elif not _is_number(value):
            yield f"{path}.{option} is {value!r}; it takes a finite number, 0 or more"
