"""`penstock generate`: text from a checkpoint of the built-in GPT."""

from __future__ import annotations

import codecs
import math
import sys
from typing import Annotated

import typer

from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.cli.output import guarded, working, write
from penstock.cli.source import whole
from penstock.errors import UsageError

Place = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT", help="A run's folder (its newest checkpoint; RUN/best: its best), or one."
    ),
]
Prompt = Annotated[str, typer.Option(help="What the text begins with.")]
Count = Annotated[int, typer.Option("--tokens", "-n", parser=whole(1), metavar="N", help="Bytes to add.")]
Temperature = Annotated[str, typer.Option(help="0: always the likeliest byte; 1: as the model says.")]
Top = Annotated[int | None, typer.Option(parser=whole(1), metavar="K", help="Choose among the K likeliest.")]
Seed = Annotated[int, typer.Option(parser=whole(0), metavar="N", help="Another seed gives another text.")]


@guarded
def generate(
    place: Place = "runs/gpt",
    prompt: Prompt = "def ",
    count: Count = 300,
    temperature: Temperature = "0.8",
    top: Top = None,
    seed: Seed = 0,
) -> None:
    """Sample text from a trained built-in GPT, to see what it has learned."""
    heat = _temperature(temperature)
    with working("loading"):
        from penstock.train.generate import continue_text, open_gpt  # loads torch

        model, _, _ = open_gpt(find_checkpoint(place))
    begin = prompt.encode("utf-8", "surrogateescape")
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    sys.stdout.write(prompt)
    for byte in continue_text(model, begin, count, temperature=heat, top=top, seed=seed):
        sys.stdout.write(decoder.decode(byte))
        sys.stdout.flush()
    write(decoder.decode(b"", final=True))


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"--temperature: {text!r} is not a temperature; give a number of 0 or more, such as 0.8")
    return value
