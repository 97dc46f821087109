"""What a pipeline and a Trainer cannot both do: refused before anything is built, all of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from penstock.errors import UsageError

# Options of Pipeline that follow from the Trainer's own arguments.
GIVEN = {
    "model": "pass it to the trainer",
    "loss_fn": "pass compute_loss_func= to the trainer",
    "precision": "set bf16=True in TrainingArguments",
    "group": "pass mesh=penstock.mesh(pp=..., dp=...)",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the pipeline that are not the user's to set here."""
    for name, remedy in GIVEN.items():
        if name in options:
            raise UsageError(f"pipeline={{{name!r}: ...}}: the trainer sets it; {remedy}")


def check_use(trainer: Trainer, args: TrainingArguments, replicas: int) -> None:
    """Refuse arguments and overrides that would be ignored, or would break the pipeline."""
    wrong = [text for is_wrong, text in _rules(trainer, args, replicas) if is_wrong]
    if wrong:
        raise UsageError("a PipelineTrainer cannot train like this:\n  " + "\n  ".join(wrong))


def _rules(trainer: Trainer, args: TrainingArguments, replicas: int) -> list[tuple[bool, str]]:
    split: Any = args.accelerator_config
    return [
        (args.fp16, "fp16=True: its loss scaling is not joined over ranks here; use bf16=True"),
        (args.fp16_full_eval or args.bf16_full_eval, "fp16_full_eval or bf16_full_eval: use bf16=True"),
        (bool(args.fsdp), "fsdp: pass pipeline={'mesh': penstock.mesh(pp=..., dp=...), 'parallel_options': "
         "penstock.ParallelOptions(replicate='fsdp')}"),
        (args.deepspeed is not None, "deepspeed: leave it out; the pipeline has its own stages and replicas"),
        (args.parallelism_config is not None, "parallelism_config: pass pipeline={'mesh': ...}"),
        (args.torch_compile, "torch_compile=True: compile submodules of the model before you pass it"),
        (args.auto_find_batch_size, "auto_find_batch_size=True: a rank without memory fails the step of all; set "
         "per_device_train_batch_size"),
        (args.train_sampling_strategy == "batch_rebalance", "train_sampling_strategy='batch_rebalance': it gives "
         "each process other rows, and the ranks of a pipeline need the same; use 'group_by_length'"),
        (args.save_on_each_node, "save_on_each_node=True: process 0 writes for all; use a folder that all hosts see"),
        (bool(split.dispatch_batches), "accelerator_config dispatch_batches=True: every rank reads its batches itself"),
        (args.eval_use_gather_object, "eval_use_gather_object=True: return tensors from the model"),
        (replicas > 1 and not args.average_tokens_across_devices, "average_tokens_across_devices=False: with "
         "replicas, the loss is the mean over all of their tokens"),
        (args.world_size > 1 and trainer.optimizer is not None, "optimizers=(...): it has parameters of other ranks; "
         "pass optimizer_cls_and_kwargs=(torch.optim.SGD, {'lr': 0.1})"),
        (type(trainer).compute_loss is not Trainer.compute_loss, "compute_loss() is overridden: the loss is computed "
         "by the last stage, once per microbatch; pass compute_loss_func="),
    ]  # fmt: skip


def check_optimizer(optimizer: torch.optim.Optimizer, own: list[torch.nn.Parameter], name: str) -> None:
    """Refuse an optimizer that takes the whole model and not groups of parameters: it would train what is not here."""
    known = {id(parameter) for parameter in own}
    foreign = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in known]
    if foreign:
        raise UsageError(
            f"{name} is made from the whole model, and took {len(foreign)} parameters that this process does not "
            f"train; choose an optimizer of parameter groups, such as optim='adamw_torch'"
        )
