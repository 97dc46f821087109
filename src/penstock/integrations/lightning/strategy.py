"""A Lightning strategy that runs a LightningModule as a pipeline, one rank per process.

Lightning's loop stays: epochs, callbacks, loggers, learning rates. A training step is `pipe.step`, whose gradients are
handed over where Lightning calls backward; validation, test and prediction are `pipe.evaluate`. Every rank reads the
same batches and logs the same numbers. Checkpoints are those of a run without a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from penstock.checkpoint.generators import restore_generators, states_of_generators
from penstock.errors import CheckpointError, UsageError
from penstock.integrations.accumulation import AccumulationScale, take_count
from penstock.integrations.lightning.checkpoint_io import PipelineCheckpointIO
from penstock.integrations.lightning.checks import check_options, check_use
from penstock.integrations.lightning.steps import (
    TRAINING,
    ModuleSteps,
    example_batch,
    follow_log,
    joined_logs,
    number_of,
)
from penstock.integrations.optimizer_state import OptimizerState, load_own
from penstock.parallel.mesh import Axes, mesh
from penstock.pipeline import Pipeline
from penstock.pipeline.model_state.carry import carry
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.batch.microbatch import Microbatches
from penstock.runtime.messages.collective import all_gather
from penstock.schedule import Schedule, family

PREFIX = "module."  # The LightningModule's names in `ModuleSteps` begin so.
CLOCK = "penstock"  # Key in a checkpoint: where the pipeline's random numbers stand.
STEPS = {
    TrainerFn.FITTING: TRAINING,
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class PipelineStrategy(DDPStrategy):
    """A Lightning strategy that runs a LightningModule as a pipeline, with one rank per process.

    `Trainer(strategy=PipelineStrategy(microbatches=8), devices=4)`.

    Args:
        microbatches: Number of slices that each batch is split into.
        replicas: Number of pipelines that run side by side, each on its own batches.
        example: A batch of the data. Required only if the loader cannot provide one before training.
        checkpoint_io: As in Lightning; a `PipelineCheckpointIO` writes Penstock's own format.
        **options: Further options of `penstock.Pipeline`. Without `stages`, there are as many as the schedule needs for
            one rank per process.
    """

    def __init__(
        self,
        *,
        microbatches: int | None = None,
        replicas: int = 1,
        example: Any = None,
        checkpoint_io: Any = None,
        **options: Any,
    ) -> None:
        check_options(options)
        super().__init__(checkpoint_io=checkpoint_io)
        self._options = options if microbatches is None else {"microbatches": microbatches, **options}
        self._replicas, self._example = replicas, example
        self._axes = Axes()
        self._steps: ModuleSteps | None = None
        self._pipe: Pipeline | None = None
        self._most = 1  # microbatches
        self._accumulation = AccumulationScale()
        # Gradients of the step whose backward is to come.
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        # For each optimizer, the names of all parameters that it was made of.
        self._orders: list[list[str]] = []
        if isinstance(checkpoint_io, PipelineCheckpointIO):
            checkpoint_io.strategy = self

    # -- setting up

    @property
    def pipe(self) -> Pipeline:
        """The pipeline that runs the module; it is built when the trainer sets up the strategy."""
        if self._pipe is None:
            raise UsageError("there is no pipeline yet; trainer.fit(), validate(), test() and predict() make it")
        return self._pipe

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each replica reads its own rows, on all ranks of its pipeline."""
        return {"num_replicas": self._axes.size("dp"), "rank": self._axes.index("dp")}

    def setup_environment(self) -> None:
        before = states_of_generators()
        super().setup_environment()  # seeds them again, so that the data would come in another order than without it
        restore_generators(before)
        if self._replicas > 1 and self._axes.mesh is None:
            self._axes = Axes(mesh(pp=-1, dp=self._replicas))
        seeds = all_gather(torch.initial_seed(), dist.group.WORLD)
        if len(set(seeds)) > 1:  # all ranks of a pipeline must shuffle alike
            torch.manual_seed(seeds[0])

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module: Any = self.lightning_module
        check_use(module, trainer)
        if self._steps is None or self._steps.module is not module:
            self.precision_plugin.convert_module(module).to(self.root_device)
            self._build(trainer, module)
        follow_log(module)
        module.__dict__["zero_grad"] = self.pipe.zero_grad  # Lightning calls it before validation
        self.model = module
        # With one replica all ranks read what one process would; Lightning would shard by process.
        trainer._accelerator_connector.use_distributed_sampler &= self._axes.size("dp") > 1
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _build(self, trainer: Any, module: Any) -> None:
        if self._pipe is not None:
            self._pipe.close()
        options = dict(self._options)
        schedule = options.get("schedule", "1f1b")
        if not isinstance(schedule, Schedule):
            if "microbatches" not in options:
                raise UsageError("say how many microbatches a batch is cut into: PipelineStrategy(microbatches=8)")
            if not options.get("split_at") and "balance" not in options:
                ranks = self.world_size // self._axes.size("dp")
                options.setdefault("stages", ranks * family(schedule).stages_per_rank)
        batch_options = options.pop("batch_options", BatchOptions())
        dims = {**batch_options.dims, "output": None}  # what each microbatch has returned, as it is
        follow_log(module)
        example = example_batch(trainer, 2) if self._example is None else self._example
        example = self.precision_plugin.convert_input(self.batch_to_device(example, self.root_device))
        self._steps = ModuleSteps(module)
        self._pipe = Pipeline(
            self._steps,
            example=(STEPS[trainer.state.fn], example, 0),
            batch_options=replace(batch_options, dims=dims),
            mesh=self._axes.mesh,
            **options,
        )
        self._pipe.state.scaler = self._accumulation
        self._most = self._pipe.microbatches

    def setup_optimizers(self, trainer: Any) -> None:
        """Make optimizers as the module does, of the parameters that this process trains."""
        super().setup_optimizers(trainer)
        assert self._steps is not None
        names: dict[int, str] = {}
        for name, parameter in self._steps.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        own = {id(parameter) for parameter in self.pipe.parameters()}
        self._orders = []
        for optimizer in self.bare_optimizers():
            every = [names.get(id(each), "") for group in optimizer.param_groups for each in group["params"]]
            if "" in every:
                raise UsageError("an optimizer has a parameter that is not the LightningModule's own; leave it out")
            self._orders.append(every)
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if id(each) in own]

    def bare_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers without what Lightning wraps around them."""
        return [each._optimizer if isinstance(each, LightningOptimizer) else each for each in self.optimizers]

    def teardown(self) -> None:
        module = self._lightning_module
        self._gradients = []
        if module is not None:
            for name in ("log", "zero_grad"):
                module.__dict__.pop(name, None)
        self._lightning_module = None  # Lightning would move parameters that are on other ranks
        super().teardown()
        self._lightning_module = module

    # -- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch; the gradients wait for `backward`, because zero_grad comes before that."""
        batch, *rest = (*args, *kwargs.values())
        module: Any = self.lightning_module
        self._accumulation.scale = 1.0 / module.trainer.accumulate_grad_batches
        call = (TRAINING, batch, *rest)
        take_count(self.pipe, self._most, call)
        parameters = list(self.pipe.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with self.precision_plugin.train_step_context():
            result = self.pipe.step(*call, outputs=True)
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        self._log(result.output and joined_logs(result, batch, self.pipe.microbatches))
        assert result.loss is not None
        return result.loss.to(self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over the gradients of the last training step."""
        module: Any = self.lightning_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in self._gradients:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._gradients = []
        return self.precision_plugin.post_backward(closure_loss, module)

    def _clip(self, optimizer: Any, clip_val: int | float) -> None:
        self.pipe.clip_grad_norm_(clip_val)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch, on every rank."""
        with self.precision_plugin.predict_step_context():
            output = self._evaluate("predict_step", *args, **kwargs)
        deployment, found = self.pipe.deployment, [output]
        if deployment.world.transport is not None:
            ranks = [rank for rank in range(deployment.schedule.ranks) if rank != self._last]
            items = [("prediction", self._last, ranks)]
            carry(deployment.world.transport, items, lambda _: output, lambda _, value: found.append(value))
        return found[-1]

    def _evaluate(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch in one piece, so that all that the step computes is of the whole batch; the last rank
        decides.
        """
        batch, *rest = (*args, *kwargs.values())
        result = self.pipe.evaluate(step, Microbatches([batch]), *rest, outputs=True)
        output = result.output or {"output": None, "logged": {}}
        self._log({name: number_of(value, options) for name, (value, options) in output["logged"].items()})
        return output["output"]

    @property
    def _last(self) -> int:
        deployment = self.pipe.deployment
        return deployment.placement.rank_of(deployment.staged.stages - 1)

    def _log(self, logged: Any) -> None:
        """Log what the last stage has logged, on every rank."""
        module: Any = self.lightning_module
        world = self.pipe.deployment.world
        said = world.all_gather("log()", logged or {})[0 if world.transport is None else self._last]
        for name, (value, dtype, options) in said.items():
            module.log(name, torch.tensor(value, dtype=getattr(torch, dtype), device=self.root_device), **options)

    # -- among processes

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over replicas: the ranks of one pipeline have the same value already."""
        if group is None and self._axes.size("dp") == 1:
            return tensor
        return super().reduce(tensor, self._axes.mesh.get_group("dp") if group is None else group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce over all processes."""
        said = all_gather(bool(decision), dist.group.WORLD)
        return False not in said if all else True in said

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def _by_parts(self) -> bool:
        return isinstance(self.checkpoint_io, PipelineCheckpointIO)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole module, on process 0."""
        if self._by_parts():
            return {}
        state = self.pipe.full_state_dict(rank=0)
        return {name.removeprefix(PREFIX): value for name, value in state.items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._by_parts():
            state = {f"{PREFIX}{name}": value for name, value in checkpoint["state_dict"].items()}
            missing, unexpected = load_own(self.pipe, state)
            if strict and (missing or unexpected):
                raise CheckpointError(
                    f"the checkpoint does not fit the module: missing {missing or 'none'}, unknown "
                    f"{unexpected or 'none'}; set strict_loading=False to load what fits"
                )
        clock = self.pipe.deployment.counter
        clock.seed, clock.step, clock.evaluations = checkpoint.get(CLOCK, (clock.seed, clock.step, clock.evaluations))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer of the whole module, on process 0."""
        if self._by_parts():
            return {}
        bare = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        number = [each is bare for each in self.bare_optimizers()].index(True)
        return OptimizerState(self.pipe, self._orders[number], bare).whole()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._by_parts():
            states = checkpoint["optimizer_states"]
            for optimizer, names, state in zip(self.bare_optimizers(), self._orders, states, strict=True):
                OptimizerState(self.pipe, names, optimizer).load(state, "the checkpoint")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save on every process."""
        clock = self.pipe.deployment.counter
        checkpoint[CLOCK] = (clock.seed, clock.step, clock.evaluations)
        if self._by_parts():
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)
