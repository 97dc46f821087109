"""`penstock checkpoint`: what checkpoints there are, whether they are whole, and what is in them.

Listing and verifying read text and bytes, so they answer without torch; what looks into tensors loads it when called.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.checkpoint.disk.manifest import Manifest, best_of, checkpoints_at, damages, find_checkpoint, read_manifest
from penstock.cli.output import guarded, working, write, write_json
from penstock.cli.source import AsJson, option
from penstock.errors import CheckpointError, UsageError
from penstock.reading import read_json
from penstock.schedule.files.drawing import table
from penstock.view.figures import bytes_text

checkpoint = typer.Typer(
    name="checkpoint",
    help="Checkpoints: list them, verify them, export their weights, compare two.",
    rich_markup_mode=None,
)


@checkpoint.callback(invoke_without_command=True)
def _entry(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


One = Annotated[
    str,
    typer.Argument(
        help="A checkpoint; or a directory of them or a run, for the newest complete one; RUN/best: the best."
    ),
]
SHOWN = 20


def _inspect(path: Path, sums: bool) -> tuple[Manifest | None, list[str]]:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return None, [str(error)]
    return manifest, list(damages(path, manifest, sums=sums))


def _document(path: Path, manifest: Manifest | None, wrong: list[str]) -> dict[str, Any]:
    document: dict[str, Any] = {"path": str(path), "whole": not wrong, "problems": wrong}
    if manifest is not None:
        names = ("step", "serial", "saved_at", "bytes", "layout", "versions", "config", "score")
        document |= {name: getattr(manifest, name) for name in names}
    return document


@checkpoint.command("list", short_help="The checkpoints of a directory.")
@guarded
def list_(
    directory: Annotated[str, typer.Argument(help="A directory of checkpoints.")], as_json: AsJson = False
) -> None:
    """List the checkpoints of a directory, the newest last. Checksums are not read: see verify."""
    inspected = [(path, *_inspect(path, sums=False)) for path in checkpoints_at(directory)]
    inspected.sort(key=lambda each: -1 if each[1] is None else each[1].serial)
    if as_json:
        write_json([_document(*each) for each in inspected])
        return
    best = best_of([(path, manifest) for path, manifest, wrong in inspected if manifest is not None and not wrong])
    rows: list[tuple[str, ...]] = [("checkpoint", "step", "saved at", "size", "stages", "schedule", "processes", "")]
    for path, manifest, wrong in inspected:
        if manifest is None:
            rows.append((path.name, "", "", "", "", "", "", wrong[0]))
            continue
        layout = [str(manifest.layout.get(name, "")) for name in ("stages", "schedule", "processes")]
        score = "" if manifest.score is None else f", score {manifest.score:.4f}{', the best' if path == best else ''}"
        state = wrong[0] if wrong else f"complete{score}"
        rows.append((path.name, str(manifest.step), manifest.saved_at, bytes_text(manifest.bytes), *layout, state))
    write(table(rows, left=range(len(rows[0]))))


@checkpoint.command("verify", short_help="Read all of them and compare checksums.")
@guarded
def verify(
    places: Annotated[list[str], typer.Argument(help="Checkpoints, or directories of them.")], as_json: AsJson = False
) -> None:
    """Read every byte of checkpoints and compare checksums; exit code 1 where one is damaged."""
    inspected = []
    for place in places:
        for path in checkpoints_at(place):
            with working(f"reading {path}"):
                inspected.append((path, *_inspect(path, sums=True)))
    if as_json:
        write_json([_document(*each) for each in inspected])
    else:
        for path, manifest, wrong in inspected:
            if wrong or manifest is None:
                write("\n".join([f"{path}: damaged", *(f"  {line}" for line in wrong)]))
            else:
                count = f"{len(manifest.files)} files, {bytes_text(manifest.bytes)}"
                write(f"{path}: complete (step {manifest.step}, {count}, every checksum right)")
    if any(wrong for _, _, wrong in inspected):
        raise typer.Exit(1)


@checkpoint.command("export", short_help="The weights as safetensors.")
@guarded
def export(
    source: One,
    out: Annotated[str, typer.Argument(help="A new directory, or a file that ends in .safetensors.")],
    dtype: Annotated[
        str | None, option("Write floating-point tensors as float32, float16 or bfloat16.", "--dtype")
    ] = None,
    file_size: Annotated[
        str | None, option("The most that one file holds, such as 5GB; else one file.", "--file-size")
    ] = None,
    merge: Annotated[bool, option("Add LoRA adapters to the weights; else they alone.", "--merge")] = False,
    tokenizer: Annotated[
        str | None, option("A folder with a tokenizer; else that of the model's folder.", "--tokenizer")
    ] = None,
    averages: Annotated[
        bool, option("Write the moving averages of the weights (training.ema), not the weights.", "--ema")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the weights as safetensors; in Hugging Face's layout where the model came from transformers.

    Of a run with LoRA it is the adapter in peft's format, or with --merge the model that has it in its weights.
    """
    limit = None if file_size is None else _bytes_of(file_size)
    path = find_checkpoint(source)
    from penstock.checkpoint.export import export as write_out  # loads torch

    with working(f"exporting {path}"):
        done = write_out(path, out, dtype=dtype, file_bytes=limit, merge=merge, tokenizer=tokenizer, averages=averages)
    if as_json:
        write_json({"checkpoint": str(path), **asdict(done), "files": [str(file) for file in done.files]})
        return
    write(f"{path}: {done.tensors} tensors, {bytes_text(done.bytes)}, written to")
    for file in done.files:
        write(f"  {file}")
    if done.adapter:
        write(f"load it with PeftModel.from_pretrained(model, {str(Path(out))!r}); --merge writes the model with it")
    if done.huggingface:
        write(f"load them with {auto_class(Path(out))}.from_pretrained({str(Path(out))!r})")


def auto_class(folder: Path) -> str:
    """Return the class of transformers that loads the model as what its configuration names: a language model, say."""
    try:
        named = read_json(folder / "config.json").get("architectures")
    except OSError:
        return "AutoModel"
    causal = any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in named or ())
    return "AutoModelForCausalLM" if causal else "AutoModel"


def _bytes_of(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d*)?) *([kmgt]?)b", text.strip().lower())
    if found is None:
        raise UsageError(f"--file-size {text}: write a number and a unit, such as 5GB or 500MB")
    return int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " "))


@checkpoint.command("diff", short_help="Two of them, tensor by tensor.")
@guarded
def diff(
    one: One,
    other: One,
    everything: Annotated[
        bool, option("Also compare what processes keep: generators, data, scheduler.", "--all")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor, whatever their layouts; exit code 1 where they differ."""
    paths = find_checkpoint(one), find_checkpoint(other)
    from penstock.checkpoint.difference import compare  # loads torch

    with working("comparing"):
        found = compare(*paths, everything=everything)
    if as_json:
        write_json({"checkpoints": [str(path) for path in paths], **asdict(found)})
    else:
        write(f"steps {found.steps[0]} and {found.steps[1]}: {found.same} tensors are the same to the bit")
        for change in found.changes[:SHOWN]:
            write(f"  {change.name}: {change.what}")
        if len(found.changes) > SHOWN:
            write(f"  ... and {len(found.changes) - SHOWN} more (all with --json)")
        for line in found.config:
            write(f"  {line}")
    if found:
        raise typer.Exit(1)
