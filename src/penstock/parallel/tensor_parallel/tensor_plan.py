"""Which modules are spread over the tp axis, and how: by patterns of the names that the model itself gives them.

A plan knows nothing of stages. It is matched against the whole model's names on every rank, so a pattern that matches
nothing is found at once, wherever its modules would have been; then each rank spreads the modules of its own stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from penstock.errors import UsageError

STYLES = ("colwise", "colwise-gathered", "rowwise", "embedding", "sequence")


@dataclass(frozen=True)
class TensorPlan:
    """How layers are divided over the axis `tp`: patterns of module names, such as `layers.*.wq`, to styles.

    A style is one of torch's (`torch.distributed.tensor.parallel.ParallelStyle`), or a name for a usual one:

    - `colwise`: a linear layer divided by its outputs; each rank continues with its own part.
    - `colwise-gathered`: the same, and the outputs are gathered.
    - `rowwise`: a linear layer divided by its inputs, as a colwise layer left them; the outputs are summed.
    - `embedding`: an embedding divided by its rows; the outputs are summed.
    - `sequence`: a norm or dropout on rows that are divided along the sequence (dimension 1).

    Args:
        styles: The patterns and their styles. The last pattern that matches decides.
        loss_parallel: Whether the last stage's output stays divided over classes, for torch's parallel cross-entropy.
    """

    styles: Mapping[str, Any] = field(default_factory=dict)
    loss_parallel: bool = False

    def resolve(self, names: Iterable[str]) -> dict[str, Any]:
        """Find the style of each module that is named; the last pattern that matches decides.

        Args:
            names: The names of the model's modules.
        """
        known = list(names)
        found: dict[str, Any] = {}
        for pattern, style in self.styles.items():
            matches = [name for name in known if fnmatchcase(name, pattern)]
            if not matches:
                near = get_close_matches(pattern, known, 3, 0.4) or known[:3]
                raise UsageError(
                    f"tensor_plan: no module matches {pattern!r}; the model has, for example, "
                    f"{', '.join(map(repr, near))}"
                )
            found.update(dict.fromkeys(matches, style))
        return {name: make_style(style) for name, style in found.items()}


# The built-in GPT of `penstock train`, and models of its shape.
GPT_PLAN = TensorPlan(
    {
        "embed.token": "embedding",
        "block*.project": "colwise",
        "block*.join": "rowwise",
        "block*.widen": "colwise",
        "block*.narrow": "rowwise",
        "head.scores": "colwise-gathered",
    }
)

# Hugging Face's LlamaForCausalLM, and models with the same names (Mistral, Qwen2, ...).
LLAMA_PLAN = TensorPlan(
    {
        "model.embed_tokens": "embedding",
        "model.layers.*.self_attn.[qkv]_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "lm_head": "colwise-gathered",
    }
)

READY = {"gpt": GPT_PLAN, "llama": LLAMA_PLAN}


def plan_of(given: Any) -> TensorPlan | None:
    """Resolve `tensor_plan=`: a plan, the name of a ready one, or a dict of patterns."""
    if given is None or isinstance(given, TensorPlan):
        return given
    if isinstance(given, str) and given in READY:
        return READY[given]
    if isinstance(given, Mapping) and all(isinstance(pattern, str) for pattern in given):
        return TensorPlan(dict(given))
    raise UsageError(
        f"ParallelOptions(tensor_plan={given!r}): pass a dict of module-name patterns to styles, a "
        f"penstock.TensorPlan, or the name of a ready one: {', '.join(map(repr, READY))}"
    )


def make_style(style: Any) -> Any:
    # a plan can be made and checked without DTensor, which takes as long to load as torch itself
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
    from torch.distributed.tensor.parallel.style import ParallelStyle

    if isinstance(style, ParallelStyle):
        return copy.deepcopy(style)
    makers: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "colwise-gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
        "embedding": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence": SequenceParallel,
    }
    if not isinstance(style, str) or style not in makers:
        raise UsageError(f"the style {style!r}: choose one of {', '.join(map(repr, STYLES))}, or a ParallelStyle")
    return makers[style]()
