"""The `penstock` command: models trained; schedules looked at, proved, priced and compared; from a shell.

One file per command; each reads a schedule through `source`, hands the work to the library and writes through `output`.
Options that several commands have are the fields of a dataclass (`Sizes`, `TimeOptions`), see `output.guarded`. Nothing
here knows anything about schedules that the library does not say, and nothing here imports torch before it has to, so
the command answers at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

import penstock
from penstock.cli.bench import bench
from penstock.cli.checkpoint import checkpoint
from penstock.cli.doctor import doctor
from penstock.cli.evaluate import evaluate
from penstock.cli.generate import generate
from penstock.cli.output import complain
from penstock.cli.plan import plan
from penstock.cli.primer import primer
from penstock.cli.schedules.compare import compare
from penstock.cli.schedules.rehearse import rehearse
from penstock.cli.schedules.search import search
from penstock.cli.schedules.show import show
from penstock.cli.schedules.simulate import simulate
from penstock.cli.schedules.studio import studio
from penstock.cli.schedules.verify import verify
from penstock.cli.schedules.view import view
from penstock.cli.schedules.whatif import whatif
from penstock.cli.train import train
from penstock.tools.train.config.source import search_no_working_folder

__all__ = ["app", "main"]

EXAMPLES = """Examples:\n
\b
  penstock train examples/train/gpt.toml training.steps=100
  penstock plan huggingface:llama --cluster examples/clusters/h100.toml --batch 512 --sequence 4096
  penstock generate runs/gpt --prompt 'class '
  penstock show zb-v --ranks 4 --microbatches 8
  penstock show 1f1b -r 4 -m 8 --lowered --save program.csv
  penstock verify program.csv
  penstock simulate zb-v -r 4 -m 16 --weight 0.8 --hop 0.1
  penstock compare -r 8 -m 32
  penstock search -r 8 -m 32 --weight 0.7 --hop 0.05 --memory 8 --save best.csv
  penstock view 1f1b zb-v -r 4 -m 8 --html page.html
  penstock studio --out studio.html
  penstock whatif --from run.json --ranks 8 --schedule zb-v
  penstock checkpoint verify runs/checkpoints
  penstock doctor --ranks 2
  penstock primer all-reduce
  penstock bench overhead --quick --schedules 1f1b,zb-v
"""


class Commands(typer.core.TyperGroup):
    """A group whose usage errors are one plain paragraph on stderr, whatever the terminal."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command; as typer's own, but for how errors look."""
        if not extra.pop("standalone_mode", True):
            return super().main(*args, **{**extra, "standalone_mode": False})
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            path = context.command_path if context is not None else "penstock"
            complain(f"{error.format_message().rstrip('.')}; see {path} --help")
            code = 2
        except typer.Abort:
            code = 130
        raise SystemExit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Train models as a pipeline; draw, prove, price and compare its schedules.",
    epilog=EXAMPLES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
NAMES: dict[Any, str] = {evaluate: "eval"}  # a name that Python has taken
SETTINGS: dict[Any, dict[str, Any]] = {bench: {"allow_interspersed_args": False}}  # what follows a name is the bench's
LOOKING = (show, verify, simulate, rehearse, compare, search, view, studio, whatif)
for command in (train, plan, evaluate, generate, *LOOKING, primer, bench, doctor):
    short = (command.__doc__ or "").partition(":")[0].partition(".")[0] + "."
    app.command(NAMES.get(command), short_help=short, context_settings=SETTINGS.get(command))(command)
app.add_typer(checkpoint, name="checkpoint", short_help="Checkpoints: list, verify, export, diff.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {penstock.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _entry(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command; see also `penstock.__main__`."""
    search_no_working_folder()
    app()
