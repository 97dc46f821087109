"""Every key of the configuration file, with its type, default and bounds.

This is the only list of them. The file is checked against these classes (`config`), the documentation's table is
compared with them, and the code that trains reads them as plain attributes. Nothing here loads torch, so that a wrong
key is refused at once.
"""

# ruff: noqa: RUF009  (`key` makes a field with a factory where the default is mutable)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def key(
    default: Any,
    about: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    code: bool = False,
) -> Any:
    """Return one key: its default, what it is, the values it may have, and whether it may name code to run."""
    bounds = {"about": about, "least": least, "above": above, "most": most, "code": code}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=bounds)
    return field(default=default, metadata=bounds)


@dataclass(frozen=True)
class TrainedModel:
    """What is trained."""

    source: str = key(
        "gpt",
        '"gpt", "module:function" that returns a model, "huggingface:FOLDER" that save_pretrained has written, or '
        '"huggingface:NAME" of a configuration',
        code=True,
    )
    options: dict[str, Any] = key({}, "keyword arguments of the source")
    init: Literal["pretrained", "random"] | None = key(
        None, "the weights of a FOLDER, or random ones (default: pretrained for a folder, else random)"
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = key(
        "float32", "of the weights of a Hugging Face model; auto: as its configuration says"
    )


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, through peft: only they are trained."""

    rank: int = key(0, "rank of the adapters; 0: none, unless lora.adapter has some", least=0)
    alpha: float | None = key(
        None, "what their product is multiplied by is alpha / rank (default: twice the rank)", above=0
    )
    dropout: float = key(0.0, "share of an adapter's inputs that training drops", least=0, most=0.9)
    targets: list[str] = key(
        [],
        'ends of the names of the layers that get adapters, or ["all-linear"] (default: what peft knows for the model)',
    )
    adapter: str | None = key(None, "a folder with an adapter in peft's format to start from")


@dataclass(frozen=True)
class GPTOptions:
    """The options of the built-in GPT."""

    layers: int = key(6, "transformer blocks", least=1, most=10_000)
    width: int = key(128, "numbers for a token between blocks", least=1, most=1e6)
    heads: int = key(4, "attention heads", least=1)
    vocabulary: int = key(256, "tokens that it knows; text as bytes has 256", least=2, most=1e9)
    context: int | None = key(None, "the longest row that it takes (default: data.sequence)", least=1, most=1e9)
    dropout: float = key(0.0, "share of the numbers that training drops", least=0, most=0.9)


@dataclass(frozen=True)
class Data:
    """What it is trained on."""

    source: str | list[str] = key(
        "stdlib",
        '"stdlib"; files and globs (one or a list) of text, or of rows: .jsonl, .parquet, .arrow, a folder written by '
        'save_to_disk; or "module:function" that returns batches',
        code=True,
    )
    options: dict[str, Any] = key({}, "keyword arguments of a module:function")
    tokens: Literal["bytes", "uint8", "uint16", "int32", "int64"] = key(
        "bytes", "how files without a tokenizer hold tokens: text as bytes, or memory-mapped numbers"
    )
    tokenizer: str = key("", "a folder with a tokenizer of transformers, or a tokenizer.json; nothing is downloaded")
    end: str = key("", "the token at the end of each text (default: the tokenizer's own, where it has one)")
    format: Literal["auto", "messages", "prompt", "input_ids", "text"] = key(
        "auto",
        "what rows hold: chats, prompts with completions, tokens, or text (default: by their columns); set, a "
        "module:function returns rows instead of batches",
    )
    columns: dict[str, Any] = key({}, 'columns that have other names: { messages = "conversation" }')
    loss_on: Literal["answers", "all"] = key("answers", "the tokens of chats and prompts that are learned")
    sequence: int = key(128, "tokens in a row", least=1)
    batch: int = key(32, "rows in a step, all accumulated steps together", least=1)
    packing: bool = key(False, "whether several short documents share a row, without seeing each other")
    max_tokens: int | None = key(
        None, "the most tokens per microbatch, padding included; rows of similar length share one", least=1
    )
    too_long: Literal["truncate", "split", "drop", "error"] = key(
        "truncate", "what happens to rows of more than data.sequence tokens"
    )
    empty: Literal["error", "drop"] = key("error", "what happens to rows that hold nothing to learn")
    shuffle: bool = key(True, "whether rows come in an order drawn from the seed, another one in each epoch")
    streaming: bool = key(False, "whether rows are read while training goes on, instead of before it")
    window: int = key(
        1000, "documents that are packed together, and under streaming shuffled among each other", least=1
    )
    validation: float = key(
        0.05,
        "share of the tokens or rows, from their end, that is kept for evaluation; of rows, at least one",
        least=0,
        most=0.9,
    )
    validation_source: str | list[str] = key(
        [], "rows to evaluate with instead of such a share; as data.source", code=True
    )


@dataclass(frozen=True)
class Loss:
    """What is minimized, and how it is averaged."""

    function: str = key(
        "", '"module:function" of (output, target) (default: cross-entropy of the next token)', code=True
    )
    options: dict[str, Any] = key({}, "further keyword arguments of that function")
    weight: Literal["tokens", "rows"] | None = key(
        None,
        "what counts alike in a step, whatever batch it is in: each target token, or each row (default: tokens; for a "
        "function of yours, what the pipeline finds)",
    )
    label_smoothing: float = key(0.0, "share of the probability that the target leaves to all tokens", least=0, most=1)
    router: float | None = key(
        None,
        "coefficient of a mixture of experts' router loss (default: the model's own, where it asks for one)",
        least=0,
    )


@dataclass(frozen=True)
class PipelineOptions:
    """How it is cut and scheduled."""

    ranks: int = key(4, "ranks of the pipeline", least=1)
    stages: int | None = key(None, "stages of the model (default: what the schedule's family has)", least=1)
    schedule: str = key("1f1b", "a family's name, or a .csv or .json file")
    microbatches: int = key(8, "slices of a batch", least=1)
    balance: Literal["parameters", "time", "memory"] | list[int] = key(
        "parameters", "what the cut evens out, or layers by stage"
    )
    split_at: list[str] = key([], "names of the units with which stages 1, 2, ... begin")
    device: Literal["auto", "cpu"] = key("auto", "where ranks compute: on the accelerator if there is one, or the CPU")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "of forwards: bf16 on an accelerator and else fp32, or one of these; fp16 has its loss scaled"
    )
    recompute: Literal["never", "except_last", "always"] = key("never", "whose forward runs again in the backward")
    overlap_steps: bool = key(False, "whether ranks go on to the next step without waiting for each other")
    workers: Literal["processes", "threads"] = key("processes", "what the ranks are")
    timeout: float = key(60.0, "seconds until a silent rank counts as stalled", above=0)


@dataclass(frozen=True)
class Mesh:
    """Replicas of the pipeline, each with its own rows of the batch, and tensors divided over processes."""

    replicas: int = key(1, "pipelines side by side; each has pipeline.ranks processes", least=1)
    replicate: Literal["ddp", "fsdp"] = key("ddp", "whole parameters in each replica, or a part of each")
    window: int = key(2, "of fsdp: stages of a rank that are whole at a time", least=1)
    tp: int = key(1, "processes that share the tensors of each stage", least=1)
    inner: Literal["dp", "pp"] = key("dp", "whose neighbours are closest after those of tp: replicas, or ranks")
    tensor_plan: str | dict[str, Any] | None = key(
        None, 'of tp: "gpt", "llama", or patterns of layers to styles (default: by the model)'
    )


@dataclass(frozen=True)
class Optimizer:
    """How weights change, and the learning rate over time."""

    name: Literal["adamw", "adam", "sgd", "adamw8bit"] = key(
        "adamw", "the optimizer; adamw8bit is bitsandbytes' AdamW, with states of 8 bits"
    )
    implementation: Literal["default", "foreach", "fused", "loop"] = key(
        "default", "how torch's optimizers update: its own choice, many tensors at once, in one kernel, or one by one"
    )
    lr: float = key(3e-3, "the highest learning rate", above=0)
    layer_decay: float | None = key(
        None, "each layer's rate is this share of the rate of the layer above it", above=0, most=1
    )
    groups: dict[str, Any] = key(
        {}, "options by name pattern, such as {'head.*' = {lr = 1e-4, weight_decay = 0}}; the first that matches counts"
    )
    betas: list[float] = key([0.9, 0.95], "of Adam: two shares from 0 to below 1")
    eps: float = key(1e-8, "of Adam", above=0)
    momentum: float = key(0.0, "of SGD", least=0, most=1)
    weight_decay: float = key(0.1, "of parameters with two dimensions or more", least=0)
    clip: float | None = key(1.0, "the norm that gradients are clipped to", above=0)
    warmup: int = key(20, "steps in which the rate rises from 0", least=0)
    decay: Literal["constant", "linear", "cosine", "wsd"] = key(
        "cosine", "how the rate falls after that; wsd (warm-up, stable, decay) holds it first, then falls linearly"
    )
    decay_share: float = key(0.2, "of wsd: share of all steps, at the end, in which the rate falls", least=0, most=1)
    final: float = key(0.1, "share of the rate that is left at the last step", least=0, most=1)


@dataclass(frozen=True)
class Training:
    """How long, and what to do about numbers that are none."""

    steps: int = key(200, "optimizer steps in all", least=1)
    accumulate: int = key(1, "passes through the pipeline before one optimizer step", least=1)
    freeze: list[str] = key(
        [], "name patterns of parameters that are not trained; a later one that begins with ! trains its own after all"
    )
    ema: float | None = key(
        None,
        "decay per step of a moving average of the weights, which is evaluated and saved beside them, such as 0.999",
        above=0,
        most=1,
    )
    nonfinite: Literal["stop", "skip"] = key(
        "stop", "a loss or gradient that is inf or NaN ends the run, or is left out"
    )
    most_skips: int = key(10, "skipped steps in a row that end the run after all", least=1)


@dataclass(frozen=True)
class Evaluation:
    """The loss on data that is not trained on."""

    every: int = key(50, "steps between evaluations; 0: none", least=0)
    batches: int = key(4, "batches in one evaluation", least=1)
    patience: int | None = key(None, "evaluations in a row without a lower loss that end the run", least=1)
    min_delta: float = key(0.0, "by how much a loss must be lower to count as lower, for patience", least=0)


@dataclass(frozen=True)
class Checkpoints:
    """What is saved, and for how long."""

    every: int = key(50, "steps between checkpoints; 0: only at the end", least=0)
    keep_last: int = key(3, "how many of the newest stay", least=1)
    keep_every: int | None = key(None, "steps whose multiples stay for good", least=1)
    keep_best: bool = key(True, "save whenever an evaluation has the lowest loss so far, and keep that one as well")
    async_save: bool = key(True, "write while training goes on")


@dataclass(frozen=True)
class Launch:
    """How ranks are started, and started again."""

    max_restarts: int = key(3, "how often a failed run starts again from its newest checkpoint", least=0)
    elastic: bool = key(
        False,
        "whether a run under torchrun --nnodes=MIN:MAX that loses hosts goes on with fewer replicas or ranks, and "
        "grows again",
    )


@dataclass(frozen=True)
class Logging:
    """What is reported while it runs."""

    every: int = key(10, "steps between lines and recordings", least=1)
    ranks: list[int] = key([], "ranks whose own output is shown, by number, beside rank 0's")
    level: Literal["debug", "info", "warning", "error"] = key("info", "what is worth a line")
    tensorboard: Literal["auto", "on", "off"] = key(
        "auto", "write for TensorBoard: when it is installed, always, never"
    )
    wandb: Literal["off", "online", "offline"] = key(
        "off", "send figures to Weights & Biases, or keep them in the run's folder for `wandb sync`"
    )
    wandb_options: dict[str, Any] = key({}, "keyword arguments of wandb.init, such as project and name")
    callback: str | None = key(
        None, '"module:function" of yours, called on rank 0 with every step\'s figures', code=True
    )
    peak_flops: float | None = key(
        None, "FLOP/s of one rank's device, for MFU (default: from a table of GPUs; a CPU is measured)", above=0
    )


@dataclass(frozen=True)
class TrainConfig:
    """A whole configuration."""

    output: str = key("runs/gpt", "the folder of the run: checkpoints, metrics, timeline, logs")
    seed: int = key(0, "of weights, batches and dropout", least=0, most=2**63 - 1)
    prediction: dict[str, Any] = key(
        {}, "what penstock plan has predicted of this configuration; penstock plan --check compares the run with it"
    )
    model: TrainedModel = field(default_factory=TrainedModel)
    lora: Lora = field(default_factory=Lora)
    data: Data = field(default_factory=Data)
    loss: Loss = field(default_factory=Loss)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    mesh: Mesh = field(default_factory=Mesh)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    launch: Launch = field(default_factory=Launch)
    logging: Logging = field(default_factory=Logging)
