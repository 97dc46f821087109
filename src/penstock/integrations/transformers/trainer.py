"""A `transformers.Trainer` whose model runs as a pipeline.

The loop of the Trainer stays as it is: epochs, logging, callbacks, when to evaluate and when to save. What touches the
model is replaced: a training step is `pipe.step`, evaluation is `pipe.evaluate`, clipping goes by the norm over all
ranks. Checkpoints have the format of a Trainer without a pipeline, so that a run can change from one to the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import EvalLoopOutput

from penstock.errors import UsageError
from penstock.integrations.batches import AccumulationScale, first_rows, take_count
from penstock.integrations.state import OptimizerState
from penstock.integrations.transformers.accelerator import ReplicaAccelerator
from penstock.integrations.transformers.checks import check_optimizer, check_options, check_use
from penstock.integrations.transformers.loss import TrainerLoss
from penstock.integrations.transformers.pipelined import Pipelined, from_last_rank, logits_of
from penstock.parallel.mesh import Axes
from penstock.pipeline import Pipeline, StepResult
from penstock.reading import check_like, plain_path, read_json
from penstock.schedule import Schedule, family

CLOCK_NAME = "pipeline.json"  # Name in a checkpoint: where the pipeline's random numbers stand.
PER_RANK = 4  # microbatches per rank, where nothing is said and the batch has as many rows


class PipelineTrainer(Trainer):
    """A `transformers.Trainer` that runs its model as a pipeline.

    `PipelineTrainer(model, args, ..., pipeline={"schedule": "zb-v"})`. Everything but `pipeline` is as in a Trainer.

    Args:
        *args: As for a `transformers.Trainer`.
        pipeline: Options of `penstock.Pipeline`, such as `stages`, `microbatches`, `schedule`, `mesh` and `balance`.
            Under torchrun, where each process is one rank, all have defaults. In one process, `stages` is required:
            the number of stages that run as threads.
        **kwargs: As for a `transformers.Trainer`.
    """

    model: Any  # transformers' own types are those of before training
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.pipeline = dict(pipeline or {})
        check_options(self.pipeline)
        self.axes = Axes.of(self.pipeline.get("mesh"), None)
        self._pipelined: Pipelined | None = None
        self._accumulation = AccumulationScale()
        super().__init__(*args, **kwargs)
        check_use(self, self.args, self.axes.size("dp"))
        self._loss = TrainerLoss(self)

    # -- what there is

    @property
    def pipe(self) -> Pipeline:
        """The pipeline that trains the model; it is built by the first call of train(), evaluate() or predict()."""
        if self._pipelined is None:
            raise UsageError("there is no pipeline yet; train(), evaluate() and predict() make it")
        return self._pipelined.pipe

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return self._accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """Create an Accelerator as a Trainer does, one that gives all ranks of a pipeline the same batches."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ReplicaAccelerator(**self._accelerator_args)
        self.accelerator.axes = self.axes
        self.gather_function = self.accelerator.gather_for_metrics

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._on_pipeline(self.train_dataset)

    def _on_pipeline(self, dataset: Any) -> Pipelined:
        """Put the model on its pipeline, made when it is first needed; `dataset` has an example for the cut."""
        if self._pipelined is None or self._pipelined.module is not self.model:  # model_init makes new ones
            if self._pipelined is not None:
                self.pipe.close()
            self._pipelined = Pipelined(self.model, self._made(dataset))
        return self._pipelined

    def _made(self, dataset: Any) -> Pipeline:
        options: dict[str, Any] = {
            "precision": "bf16" if self.args.bf16 else None,
            **self._loss.options,
            **self.pipeline,
        }
        ranks = self.args.world_size // (self.axes.size("dp") * self.axes.size("tp"))
        schedule = options.get("schedule", "1f1b")
        if not isinstance(schedule, Schedule) and not options.get("split_at") and "balance" not in options:
            if ranks == 1 and "stages" not in options:
                raise UsageError(
                    "in one process the stages run as threads: say how many there are with pipeline={'stages': 4}"
                )
            options.setdefault("stages", ranks * family(schedule).stages_per_rank)
        if not isinstance(schedule, Schedule):
            most = PER_RANK * (ranks if ranks > 1 else options.get("stages", 1))
            options.setdefault("microbatches", min(self._train_batch_size, most))
        if "example" not in options:
            options["example"] = self._example(dataset, -(-self._train_batch_size // options.get("microbatches", 1)))
        pipe = Pipeline(self.model, **options)
        pipe.state.scaler = self._accumulation
        self._most = pipe.microbatches
        return pipe

    def _example(self, dataset: Any, rows: int) -> dict[str, Any]:
        """Return the first rows of the data, as the model gets them."""
        collate = self._get_collator_with_removed_columns(self.data_collator)
        inputs, _ = self._loss.apart(self._prepare_inputs(first_rows(dataset, rows, collate)))
        return inputs

    # -- training

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of this process's stages; every rank has the same groups."""
        pipelined = self._on_pipeline(self.train_dataset)
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(pipelined)
        if is_new:
            check_optimizer(optimizer, list(pipelined.parameters()), f"optim={self.args.optim!s}")
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return names in the whole model."""
        names: list[str] = super().get_decay_parameter_names(self.model)
        return names

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one batch by the pipeline's schedule; gradients add up until the optimizer steps."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # some optimizers have modes
            self.optimizer.train()
        call = self._loss.call(self._prepare_inputs(inputs), num_items_in_batch)
        scale = 1.0 if self._loss.is_scaled(num_items_in_batch) else 1.0 / self.current_gradient_accumulation_steps
        self._accumulation.scale = scale
        given = {name: value for name, value in call.items() if name not in ("target", "loss_kwargs")}
        take_count(self.pipe, self._most, kwargs=given, target=call.get("target"))
        result = self.pipe.step(**call)
        assert result.loss is not None  # a step without a loss is an error
        return torch.as_tensor(result.loss * scale, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.pipe.grad_norm() if grad_norm is None else grad_norm

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of one optimizer step, over all replicas."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.axes.size("dp"))

    def store_flos(self) -> None:
        """Count what the replicas computed; the ranks of one pipeline share the work that each has noted."""
        mine = torch.tensor(float(self.current_flos), dtype=torch.float64, device=self.args.device)
        self.state.total_flos += self.accelerator.gather(mine).sum().item()
        self.current_flos = 0

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(
            "hyperparameter_search() makes trials that the ranks would not share; run one trainer per trial"
        )

    # -- evaluation

    def evaluation_loop(
        self, dataloader: DataLoader[Any], description: str, *args: Any, **kwargs: Any
    ) -> EvalLoopOutput:
        """Evaluate as a Trainer does. The last stage's rank, which has the logits, computes metrics and sends them to
        all.
        """
        self._on_pipeline(dataloader.dataset if self.train_dataset is None else self.train_dataset)
        output = super().evaluation_loop(dataloader, description, *args, **kwargs)
        return from_last_rank(self.pipe, output, predictions=description == "Prediction")

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss of a batch on every rank, and its logits on the rank of the last stage."""
        inputs = self._prepare_inputs(inputs)
        labels = tuple(inputs.get(name) for name in self.label_names)
        has_labels = bool(labels) and all(each is not None for each in labels)
        has_loss = has_labels or (not labels and bool(inputs.get("return_loss", self.can_return_loss)))
        items = self._get_num_items_in_batch([inputs], self.args.device) if has_loss else None
        result: StepResult = self.pipe.evaluate(**self._loss.call(inputs, items), outputs=not prediction_loss_only)
        loss = result.loss.to(self.args.device) if has_loss and result.loss is not None else None
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]) if config else []
        logits = logits_of(result.output, [*ignore_keys, "loss"], has_loss) if self.pipe.is_last else None
        return loss, logits, (labels[0] if len(labels) == 1 else labels) if has_labels else None

    # -- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` takes, from process 0; called on every process."""
        if self._pipelined is None or self._pipelined.module is not self.model:
            super().save_model(output_dir, _internal_call)
            return
        state = self.pipe.full_state_dict(rank=0)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _optimizer_state(self) -> OptimizerState:
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        return OptimizerState(self.pipe, names, self.optimizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self._optimizer_state().whole()
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        paths = [Path(checkpoint or "", name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)]
        if checkpoint is not None and all(path.is_file() for path in paths):
            states = [torch.load(plain_path(path), map_location="cpu", weights_only=True) for path in paths]
            self._optimizer_state().load(states[0], str(paths[0]))
            self.lr_scheduler.load_state_dict(states[1])

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            clock = self.pipe.deployment.counter
            state = {"seed": clock.seed, "step": clock.step, "evaluations": clock.evaluations}
            Path(output_dir, CLOCK_NAME).write_text(json.dumps(state))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = Path(checkpoint or "", CLOCK_NAME)
        if checkpoint is not None and path.is_file():  # a Trainer without a pipeline writes none
            state, clock = read_json(path), self.pipe.deployment.counter
            check_like(numbers := [state.get(name) for name in ("seed", "step", "evaluations")], [0], path)
            clock.seed, clock.step, clock.evaluations = map(int, numbers)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        there = self._pipelined
        pipelined = there if there is not None and there.module is self.model else None
        super()._load_from_checkpoint(resume_from_checkpoint, pipelined or model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)
