"""`Pipeline`: a model, a schedule, and `step`.

A `Pipeline` joins the layers below and adds no mechanism of its own: the model is cut (model), the schedule is built,
lowered and proved (schedule), and its ranks run it (runtime). One training step is: split the batch, run the program
on every local rank, share the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.model.cut_options import CutOptions
from penstock.parallel.group.world import collective
from penstock.parallel.parallel_options import ParallelOptions
from penstock.pipeline.arguments import check_arguments, check_loss, check_reduce, op_of, with_plan
from penstock.pipeline.batches import Batches, Call
from penstock.pipeline.construction import Construction
from penstock.pipeline.model_state.save_pretrained import save_pretrained
from penstock.pipeline.model_state.state import ModelState
from penstock.pipeline.rebalance import apply_cut, propose_cut
from penstock.pipeline.steps import Steps
from penstock.pipeline.train_steps import StepLoop
from penstock.pipeline.trained_step import TrainedStep
from penstock.runtime.batch.batch_options import BatchOptions
from penstock.runtime.engine.handlers import Handler
from penstock.runtime.engine.report import StepResult
from penstock.runtime.loss.loss_options import LossOptions
from penstock.runtime.optim.tied import tied_places
from penstock.runtime.optim.updates import Updates
from penstock.runtime.state.batch_norm import warn_of_microbatches
from penstock.runtime.transport.interrupts import CTRL_C
from penstock.schedule import Op, Schedule, Timeline

Given = ParamSpec("Given")
Found = TypeVar("Found")


def _of_state(
    method: Callable[Concatenate[ModelState, Given], Found], first: Callable[[Steps], None] | None = None
) -> Callable[Concatenate[Pipeline, Given], Found]:
    """Make a method of a pipeline of one of its state, before which `first` waits for steps that are under way."""

    @wraps(method)
    def of_pipeline(pipe: Pipeline, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        if first is not None:
            first(pipe.steps)
        return method(pipe.state, *args, **kwargs)

    return of_pipeline


class Pipeline:
    """Trains a model that is cut into stages, as a pipeline, by a schedule.

    ::

        with Pipeline(model, stages=4, microbatches=8, loss_fn=F.cross_entropy) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters())
            for x, y in data:
                result = pipe.step(x, target=y)
                optimizer.step()
                optimizer.zero_grad()

    In one process the ranks of the pipeline are threads. Under `torchrun` each rank is a process; then every process
    builds the same `Pipeline` and makes the same calls. A `Pipeline` is also a context manager that closes itself.

    Args:
        model: The model to train, unmodified, or a list of modules, one per stage.
        stages: Number of stages to cut the model into. Required, unless the model is a list of stages, or
            `balance=[counts]` or `split_at=` says how many.
        microbatches: Number of slices that each batch is split into. Required unless the schedule states it.
        schedule: The name of a family (`"1f1b"`, `"zb-v"`, ...), `"auto"` to search for one, the path of a `.csv` or
            `.json` file, or a `Schedule`.
        plan: A plan of `penstock.plan`, instead of `stages`, `microbatches`, `schedule`, `balance`, `split_at` and
            `recompute`.
        loss_fn: A function of (output, target) that returns the loss. Leave it out for a model that returns its loss.
        example: Inputs of the model, as a tuple or as a dict of keyword arguments. Required for models that are neither
            `nn.Sequential` nor a list, and for `balance="time"` and `"memory"`. Only shapes and types matter.
        balance: The cost to balance across stages: `"parameters"`, `"time"`, `"memory"` or `{name: weight}`; or the
            number of layers per stage, such as `[3, 3, 2]`.
        split_at: Names of the modules that begin stages 1, 2, ..., to choose the cut yourself.
        ranks: Number of ranks when they are threads. By default, as many as the schedule's family needs.
        group: The process group of the pipeline's ranks. By default, all processes.
        mesh: A `DeviceMesh` with an axis `pp`, and `dp` and `tp` for replicas and tensor parallelism.
        devices: One device per rank, to which its stages move. By default (`"auto"`), a model that is on the CPU goes
            to the accelerator if there is one: a process takes the device of its local rank, and ranks that are
            threads take one each. `None` leaves it where it is.
        transport: `"threads"`, `"shared"` (shared memory on one host) or `"distributed"` (`torch.distributed`). By
            default, the fastest that works for each link.
        recompute: Which microbatches run their forward again in the backward, to save memory: none (`"never"`), all but
            the last (`"except_last"`) or all (`"always"`).
        precision: The dtype of forwards, as autocast uses it: `"bf16"`, `"fp16"` or `"fp32"`. By default, the autocast
            that `step()` is called under.
        seed: Where dropout and other random numbers start. By default, torch's initial seed.
        timeout: Seconds without a sign of life after which a rank counts as stalled.
        init: A function of (name, tensor) that fills the parameters of a model built under `penstock.lazy()`.
        keep_model: Whether this process keeps the initial values of stages that belong to other ranks.
        loss_options: How the losses of microbatches make the loss of the batch.
        batch_options: How batches are split into microbatches.
        cut_options: How the model is cut, beyond where.
        parallel_options: How replicas and tensors are spread over `mesh`.
    """

    _batches_type = Batches  # The schedule classes of compat/pipelining have their own.

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        stages: int | None = None,
        microbatches: int | None = None,
        schedule: str | Schedule = "1f1b",
        plan: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        example: tuple[Any, ...] | dict[str, Any] | None = None,
        balance: str | Sequence[int] | Mapping[str, float] | None = None,
        split_at: Sequence[str] = (),
        ranks: int | None = None,
        group: Any = None,
        mesh: Any = None,
        devices: Sequence[torch.device | str] | str | None = "auto",
        transport: str | None = None,
        recompute: str = "never",
        precision: str | torch.dtype | None = None,
        seed: int | None = None,
        timeout: float = 60.0,
        init: Callable[[str, Tensor], Any] | None = None,
        keep_model: bool = False,
        loss_options: LossOptions = LossOptions(),
        batch_options: BatchOptions = BatchOptions(),
        cut_options: CutOptions = CutOptions(),
        parallel_options: ParallelOptions = ParallelOptions(),
    ) -> None:
        given = with_plan(dict(locals()))
        check_arguments(model, given)
        self.recompute = given["recompute"]
        construction = Construction(given)
        self.composition, world = construction.composition, construction.world
        with world.building():
            cut = construction.cut()
            self.deployment = deployment = construction.deploy(cut)
            self.state = ModelState(deployment, keep_model)
            self.batches = self._batches_type(
                deployment,
                self.state,
                model.forward if isinstance(model, nn.Module) else model[0].forward,
                loss_fn=loss_fn,
                loss_options=loss_options,
                options=batch_options,
                recompute=self.recompute,
                min_microbatches=given["microbatches"] or 1,
            )
            self.steps = Steps(deployment, self.batches, self.state)
            self.state.materialise(model, init)
            tied = tied_places(cut)  # Later something may take the place of a parameter.
            deployment.put_on_devices()
            world.check_facts(deployment.facts(), deployment.counter)
            deployment.replication = self.composition.build(self, tied)
            world.built()
        deployment.ranks.track_changes()  # shards, or values for what had none, have taken the place of parameters
        deployment.follow_cut(tied, loss_fn)
        with world.calling("Pipeline()"):
            deployment.tied.make_equal()
        if construction.measures:
            cut.warn()
            if batch_options.batch_norm is None:
                warn_of_microbatches(model, given["microbatches"])

    # -- what it is

    @property
    def schedule(self) -> Schedule:
        """The schedule of a training step."""
        return self.deployment.schedule

    @property
    def program(self) -> Schedule:
        """The schedule with its transfers and reductions: what is actually run."""
        return self.deployment.programs.program

    @property
    def microbatches(self) -> int:
        """Number of microbatches per training step."""
        return self.deployment.programs.microbatches

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline; 0 when all ranks are threads of this process."""
        return min(self.deployment.ranks.executors)

    @property
    def is_first(self) -> bool:
        """Whether the first stage, which takes the model's inputs, is in this process."""
        return self.deployment.placement.rank_of(0) in self.deployment.ranks.executors

    @property
    def is_last(self) -> bool:
        """Whether the last stage, which has the output and the loss, is in this process."""
        return self.deployment.ranks.last is not None

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function. You may set another one between steps, on every rank: all that follows from it does."""
        return self.batches.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[..., Any] | None) -> None:
        self.steps.check_open()
        check_loss(loss_fn, self.batches.loss_options)
        self.steps.settle()
        if self.deployment.hold_loss(loss_fn):
            self.state.other_ranks.moved(self.deployment)
        self.batches.set_loss(loss_fn)
        self.deployment.follow_loss(loss_fn)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.steps.closed

    # -- training

    def step(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward for one batch; gradients are added to `.grad`, as `backward()` does.

        Call it on every rank with the same batch. If it fails on one rank, it raises on all of them.

        Args:
            *args: Positional inputs of the model. Tensors are split along dimension 0.
            target: What the loss function compares the output with; split like the inputs.
            loss_kwargs: Further keyword arguments of the loss function, split as well.
            outputs: Whether to return the model's output too, on the rank of the last stage.
            **kwargs: Keyword inputs of the model.

        Returns:
            A `StepResult` with the loss of the whole batch, the same on every rank.

        Raises:
            PeerFailure: A rank failed, died or stalled; the message says which one, where and why.
            ModelError: The batch cannot be split, or the model cannot take it.
            UsageError: An argument cannot work.
        """
        return self.steps.run(Call("step()", args, kwargs, target, loss_kwargs or {}, outputs, training=True))

    def train_steps(
        self,
        batches: Iterable[Any],
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None = None,
        scheduler: Any = None,
        skip_nonfinite: bool = False,
    ) -> Iterator[TrainedStep]:
        """Train on many batches, with an update of the weights after each; steps of different ranks overlap.

        It is the loop of `step`, `clip_grad_norm_`, `optimizer.step` and `zero_grad`, and has the same results to the
        last bit. But where ranks are processes, none of them waits for the others between two steps, so that the
        pipeline is filled and drained once and not in every step. A result comes when all ranks are done with its
        step, mostly one step late: by then this rank has run the next step too, but not updated its weights by it. So
        in the loop's body they are those after the result's step. `evaluate`, `Checkpointer.save` and all other calls
        that every rank makes wait for all ranks, and update the weights, first (`settle`).

        Call it on every rank with the same batches.

        Args:
            batches: The batches: tuples of (inputs of the model, target), without a target if there is no `loss_fn`;
                or dicts of keyword arguments of `step`.
            optimizer: This process's optimizer, over `pipe.parameters()`.
            clip: The largest norm of all gradients that is left as it is, as in `clip_grad_norm_`.
            scheduler: A scheduler of learning rates, whose `step` is called once per step, whether or not its update
                was left out.
            skip_nonfinite: Whether to leave out the update of a step whose loss or norm is inf or NaN.

        Yields:
            A `TrainedStep` for each batch, in order.
        """
        self.steps.check_not_in_loop()
        updates = Updates(optimizer, scheduler, clip, skip_nonfinite)
        updates.check_parameters([parameter for _, parameter in self.named_parameters()])
        return StepLoop(self.steps, updates).run(batches)

    def settle(self) -> None:
        """Wait until all ranks are done with the steps of `train_steps` so far. Call it on every rank.

        It is for the body of that loop, and for after a `break`.
        Then the weights, and the optimizer's state, are those after the last step. All calls that every rank makes do
        this by themselves; call it before you write to parameters or to the optimizer's state.
        """
        self.steps.settle()

    # -- inference

    def evaluate(
        self,
        *args: Any,
        target: Any = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Compute the loss of a batch of any size in eval mode, without gradients; training state is not touched.

        Args:
            *args: Positional inputs of the model.
            target: What the loss function compares the output with.
            loss_kwargs: Further keyword arguments of the loss function.
            outputs: Whether to return the model's output too, on the rank of the last stage.
            **kwargs: Keyword inputs of the model.

        Returns:
            A `StepResult`.
        """
        return self.steps.run(Call("evaluate()", args, kwargs, target, loss_kwargs or {}, outputs, training=False))

    def predict(
        self,
        *args: Any,
        reduce: Callable[..., Any] | None = None,
        reduce_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the model's output for a batch of any size in eval mode.

        With `reduce`, the last stage keeps only what the function makes of each microbatch's output, such as the
        log-probability of each token and not a row of scores for each.

        Args:
            *args: Positional inputs of the model.
            reduce: A function of the output of one microbatch, and of its `reduce_kwargs` by keyword.
            reduce_kwargs: Further keyword arguments of `reduce`, split into microbatches like the inputs.
            **kwargs: Keyword inputs of the model.

        Returns:
            The output on the rank of the last stage, `None` on the others. With `reduce`, what it made of the
            microbatches, joined like outputs; for inputs that you have split yourself (`Microbatches`), a list with
            one entry per microbatch, which may be of different shapes.
        """
        call = Call("predict()", args, kwargs, None, reduce_kwargs or {}, True, training=False, reduce=reduce)
        if reduce is None and reduce_kwargs:
            raise UsageError("reduce_kwargs= are for the function reduce=, which was not passed")
        if reduce is not None:
            check_reduce(reduce, list(call.loss_kwargs))
        return self.steps.run(call).output

    # -- a better cut

    rebalance = propose_cut
    apply = collective("apply()")(apply_cut)

    # -- the model, of which this process has some stages

    named_parameters = _of_state(ModelState.named_parameters)
    parameters = _of_state(ModelState.parameters)
    named_buffers = _of_state(ModelState.named_buffers)
    parameter_groups = _of_state(ModelState.parameter_groups)
    state_dict = _of_state(ModelState.state_dict, Steps.settle)
    load_state_dict = _of_state(ModelState.load_state_dict, Steps.settle)
    full_state_dict = _of_state(ModelState.full_state_dict, Steps.check_open)
    full_tensors = _of_state(ModelState.full_tensors, Steps.check_open)
    save_pretrained = _of_state(save_pretrained, Steps.check_open)
    fill_model = _of_state(ModelState.fill_model, Steps.check_open)
    zero_grad = _of_state(ModelState.zero_grad)
    grad_norm = _of_state(ModelState.grad_norm)
    clip_grad_norm_ = _of_state(ModelState.clip_grad_norm_)
    clip_grad_value_ = _of_state(ModelState.clip_grad_value_)

    def train(self, mode: bool = True) -> Self:
        """Put the model into training mode, or out of it, as its own `train` does.

        Args:
            mode: Whether to train (True) or evaluate (False).
        """
        self.state.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into eval mode."""
        return self.train(False)

    # -- looking at it

    def record(self) -> AbstractContextManager[Timeline]:
        """Measure the steps inside the `with` block, on every rank; the timeline holds the last of them.

        With two or more steps inside, the time that the optimizer and the loop took between them is measured too.

        Yields:
            A `Timeline` that is empty until a step has run.
        """
        return self.steps.record()

    def register(self, op: Op | str, handler: Handler | None) -> None:
        """Run your own function for every action of an op.

        Args:
            op: The op, or its name, such as `"OVERLAP_F_B"`.
            handler: A function of (action, context), where the context has the default ways to run an action. `None`
                restores the default.
        """
        which = op_of(op)
        if handler is not None and not callable(handler):
            raise UsageError(f"handler={handler!r}: pass a function of (action, context), or None for the default")
        for executor in self.deployment.ranks.executors.values():
            executor.register(which, handler)

    def describe(self) -> str:
        """Return the table of stages and how they run, as text."""
        from penstock.pipeline.stage_table import stage_table  # numpy, for the simulator: 40 ms that few need

        return stage_table(self)

    def close(self) -> None:
        """End worker threads and connections. The model keeps its values."""
        self.steps.closed = True
        self.deployment.replication.close()
        self.deployment.ranks.close()
        CTRL_C.raise_owed()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Pipeline has threads and connections, and cannot be copied or pickled; save its state_dict(), or copy "
            "the model and make another Pipeline of it"
        )

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
