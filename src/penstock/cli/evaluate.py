"""`penstock eval`: the loss of a checkpoint on validation data."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.output import guarded, working, write, write_json
from penstock.cli.source import AsJson, whole
from penstock.cli.train import Items, read_config

__all__ = ["evaluate"]

Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="A checkpoint, or a run's folder (default: the newest of `output`)."),
]
Batches = Annotated[int, typer.Option(parser=whole(1), metavar="N", help="Batches to evaluate.")]


@guarded
def evaluate(
    items: Items = None, checkpoint: Checkpoint = None, batches: Batches = 20, as_json: AsJson = False
) -> None:
    """Evaluate a checkpoint: its mean loss on the validation data of a configuration, in this process."""
    config, _ = read_config(items)
    with working("evaluating"):
        from penstock.train.evaluate import evaluate_checkpoint
        from penstock.train.generate import find_checkpoint

        found = find_checkpoint(checkpoint or config.output)
        score = evaluate_checkpoint(config, found, batches)
    facts = {"checkpoint": str(found), "step": score.step, "batches": score.batches, "loss": score.loss}
    if as_json:
        write_json(facts | {"perplexity": score.perplexity, "bits_per_token": score.bits})
        return
    write(f"{found}, step {score.step}, {score.batches} batches")
    write(f"loss {score.loss:.4f}  perplexity {score.perplexity:.2f}  {score.bits:.3f} bits a token")
