"""`penstock studio`: a page to build, compare, move and prove schedules in, as a file or served on this machine."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import guarded, write
from penstock.cli.source import BatchSizes, Sizes, complete_source, is_file, read, whole
from penstock.errors import UsageError
from penstock.schedule import FAMILIES, family
from penstock.view.studio import Shown, studio_page

LOOPBACK = "127.0.0.1"
SLOTS = 2

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME|FILE [NAME|FILE]]",
        help=f"What to begin with: families ({', '.join(FAMILIES)}) or files (.csv, .json).",
        show_default=False,
        autocompletion=complete_source,
    ),
]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page to a file, instead of serving it.")]
Port = Annotated[
    int, typer.Option(parser=whole(0), metavar="PORT", help="Where to serve it, on this machine alone; 0: a free one.")
]


@guarded
def studio(sizes: BatchSizes, sources: Sources = None, out: Out = None, port: Port = 0) -> None:
    """Open the studio: one page to build, compare, move and prove schedules in.

    Without --out it is served at an address of this machine until Ctrl-C. The page needs no network.
    """
    page = studio_page(_begin(sources or [], sizes.ranks, sizes.microbatches))
    if out is not None:
        out.write_text(page, encoding="utf-8")
        write(f"saved to {out}")
        return
    serve(page, port)


def _begin(sources: list[str], ranks: int | None, microbatches: int | None) -> Shown:
    """What the page shows first."""
    if len(sources) > SLOTS:
        raise UsageError(f"the studio shows two schedules side by side, not {len(sources)}; penstock view shows more")
    slots = [
        read(source, Sizes(ranks, microbatches)).compute() if is_file(source) else family(source).name
        for source in sources
    ]
    files = [slot for slot in slots if not isinstance(slot, str)]
    if files:
        ranks, microbatches = files[0].ranks, files[0].microbatches
    return Shown(tuple(slots), *BatchSizes(ranks, microbatches).filled())


def serve(page: str, port: int) -> None:
    """Serve one page on loopback until Ctrl-C."""
    body = page.encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the terminal shows the address."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:  # overflow: no port has such a number
        raise UsageError(f"port {port} cannot be had ({error}); leave --port out for a free one") from None
    with server:
        write(f"the studio is at http://{LOOPBACK}:{server.server_address[1]}/ (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
