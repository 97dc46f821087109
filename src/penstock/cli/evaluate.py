"""`penstock eval`: the loss of a checkpoint on validation data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from penstock.checkpoint.disk.manifest import BEST, find_checkpoint
from penstock.cli.output import guarded, working, write, write_json
from penstock.cli.source import AsJson, count, option
from penstock.cli.train import Items, Trust, load_items
from penstock.tools.train.config.source import require_trust

Checkpoint = Annotated[
    str | None,
    option(
        "A checkpoint, or a run's folder (default: the newest of `output`); best: of `output`, that of the "
        "lowest validation loss.",
        metavar="FOLDER|best",
    ),
]
Averages = Annotated[
    bool, option("With training.ema: evaluate the average of the weights, or themselves.", "--ema/--no-ema")
]
Batches = Annotated[int, count("Batches to evaluate.")]


@guarded
def evaluate(
    items: Items = None,
    checkpoint: Checkpoint = None,
    batches: Batches = 20,
    averages: Averages = True,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint: its mean loss on the validation data of a configuration, in this process."""
    config, _ = load_items(items, trust=trust or None)
    require_trust(config, "evaluating")
    with working("evaluating"):
        from penstock.tools.train.evaluate import evaluate_checkpoint  # loads torch

        found = find_checkpoint(Path(config.output, BEST) if checkpoint == BEST else checkpoint or config.output)
        step, losses, loss = evaluate_checkpoint(config, found, batches, averages)
    perplexity, bits = math.exp(min(loss, 700.0)), loss / math.log(2)
    if as_json:
        facts = {"checkpoint": str(found), "step": step, "batches": len(losses), "loss": loss}
        write_json(facts | {"perplexity": perplexity, "bits_per_token": bits})
        return
    write(f"{found}, step {step}, {len(losses)} batches")
    write(f"loss {loss:.4f}  perplexity {perplexity:.2f}  {bits:.3f} bits a token")
