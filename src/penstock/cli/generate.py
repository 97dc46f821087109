"""`penstock generate`: text from a trained language model."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from penstock.checkpoint.disk.manifest import find_checkpoint
from penstock.cli.output import guarded, working, write, write_json
from penstock.cli.source import AsJson, count, option
from penstock.errors import UsageError
from penstock.tools.train.launch.environment import prepare_environment
from penstock.view.figures import visible

Place = Annotated[
    str,
    typer.Argument(
        metavar="RUN|CHECKPOINT", help="A run's folder (its newest checkpoint; RUN/best: its best), or one."
    ),
]
Prompts = Annotated[list[str] | None, option("What the text begins with; several times for several texts.", "--prompt")]
Chat = Annotated[
    list[str] | None,
    option("A question, written by the tokenizer's chat template; as --prompt.", "--chat", metavar="TEXT"),
]
Count = Annotated[int, count("Tokens to add to each.", "--tokens", "-n")]
Temperature = Annotated[str, option("0: always the likeliest token; 1: as the model says.")]
Greedy = Annotated[bool, option("Always the likeliest token, as --temperature 0.", "--greedy")]
TopK = Annotated[int | None, count("Choose among the K likeliest.", "--top-k", metavar="K")]
TopP = Annotated[str | None, option("Choose among the likeliest that make up this share.", "--top-p", metavar="SHARE")]
Seed = Annotated[int, count("Another seed gives another text.", least=0)]
Threads = Annotated[int | None, count("Cores to compute on.", "--threads")]


@guarded
def generate(
    place: Place = "runs/gpt",
    prompts: Prompts = None,
    questions: Chat = None,
    count: Count = 300,
    temperature: Temperature = "0.8",
    greedy: Greedy = False,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write text with a model that penstock train has trained: the built-in GPT, or one of transformers.

    One text appears as it is written, token by token; several, or with --json, when all of them are complete.
    """
    options = {
        "temperature": 0.0 if greedy else _number("--temperature", temperature),
        "top_k": top_k,
        "top_p": None if top_p is None else _number("--top-p", top_p),
        "seed": seed,
    }
    if prompts and questions:
        raise UsageError("--prompt is continued as it is, --chat is a question to be answered; give one of them")
    begins = questions or prompts or ["def "]
    with working("loading"):
        prepare_environment()
        from penstock.tools.train.generation.continuing import Sampling  # loads torch, as the next does
        from penstock.tools.train.generation.opening import open_writer

        sampling = Sampling(**options)  # type: ignore[arg-type]
        writer = open_writer(find_checkpoint(place), threads)
    encode = writer.codec.encode_question if questions else writer.codec.encode
    pieces = _pieces(writer, [encode(begin) for begin in begins], count, sampling)
    if len(begins) == 1 and not as_json:
        # Nothing is written before the first token exists: a request that is refused writes only why.
        unsaid = "" if questions else begins[0]
        for _, text in pieces:
            sys.stdout.write(visible(unsaid + text) if sys.stdout.isatty() else unsaid + text)
            sys.stdout.flush()
            unsaid = ""
        write("")
        return
    texts = [""] * len(begins)
    for row, text in pieces:
        texts[row] += text
    if as_json:
        write_json([{"prompt": begin, "text": text} for begin, text in zip(begins, texts, strict=True)])
        return
    for number, (begin, text) in enumerate(zip(begins, texts, strict=True), 1):
        write(f"--- {number}\n{begin}{chr(10) if questions else ''}{text}")


def _pieces(writer: Any, prompts: list[list[int]], count: int, sampling: Any) -> Any:
    """Yield (row, text) as they come."""
    from penstock.tools.train.generation.codec import Reader  # loads torch

    readers = [Reader(writer.codec) for _ in prompts]
    for row, token in writer.continue_rows(prompts, count, sampling):
        yield row, "" if token == writer.codec.end else readers[row].add(token)
    for row, reader in enumerate(readers):
        yield row, reader.finish()


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a number; give one such as 0.8") from None
