"""`penstock studio`: a page to build, compare, move and prove schedules in, as a file or served on this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import writing
from penstock.cli.output import guarded, write
from penstock.cli.source import BatchSizes, Sizes, complete_source, count, is_file, naming, option, read
from penstock.errors import UsageError
from penstock.schedule import FAMILIES, Schedule, family
from penstock.view.studio import Shown, studio_page

LOOPBACK = "127.0.0.1"
SLOTS = 2
MOST_CLIENTS = 16  # connections at a time
LONGEST = 10.0  # seconds of a connection

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME|FILE [NAME|FILE]]",
        help=f"What to begin with: families ({', '.join(FAMILIES)}) or files (.csv, .json).",
        show_default=False,
        autocompletion=complete_source,
    ),
]
Out = Annotated[Path | None, option("Write the page to a file, instead of serving it.", metavar="FILE")]
Port = Annotated[int, count("Where to serve it, on this machine alone; 0: a free one.", metavar="PORT", least=0)]


@guarded
def studio(sizes: BatchSizes, sources: Sources = None, out: Out = None, port: Port = 0) -> None:
    """Open the studio: one page to build, compare, move and prove schedules in.

    Without --out it is served at an address of this machine until Ctrl-C. The page needs no network.
    """
    page = studio_page(_begin(sources or [], sizes.ranks, sizes.microbatches))
    if out is not None:
        writing.save(out, page)
        write(f"saved to {out}")
        return
    serve(page, port)


def _begin(sources: list[str], ranks: int | None, microbatches: int | None) -> Shown:
    """Return what the page shows first."""
    if len(sources) > SLOTS:
        raise UsageError(f"the studio shows two schedules side by side, not {len(sources)}; penstock view shows more")
    slots = [
        _file(source, Sizes(ranks, microbatches)) if is_file(source) else family(source).name for source in sources
    ]
    files = [slot for slot in slots if not isinstance(slot, str)]
    if files:
        ranks, microbatches = files[0].ranks, files[0].microbatches
    return Shown(tuple(slots), *BatchSizes(ranks, microbatches).filled())


def _file(source: str, sizes: Sizes) -> Schedule:
    with naming(source):
        return read(source, sizes).compute()


class _Server(ThreadingHTTPServer):
    """Serves one page to the browsers of this machine: to a few at a time, and to none that takes its time."""

    request_queue_size = 64

    def __init__(self, body: bytes, port: int) -> None:
        self.body = body
        self._slots = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__((LOOPBACK, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        timer = threading.Timer(LONGEST, _shut, [request])  # a client may send a byte now and then, for ever
        timer.daemon = True
        timer.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            timer.cancel()
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing: a client has left, or was too slow."""


def _shut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = LONGEST  # seconds

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        if self.headers.get_all("Host") not in [[f"{name}:{port}"] for name in (LOOPBACK, "localhost")]:
            self.send_error(HTTPStatus.FORBIDDEN)  # somebody's web page that has its name mean this machine
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: the terminal shows the address."""


def serve(page: str, port: int) -> None:
    """Serve one page on loopback until Ctrl-C."""
    try:
        server = _Server(page.encode(), port)
    except (OSError, OverflowError) as error:  # overflow: no port has such a number
        raise UsageError(f"port {port} cannot be had ({error}); leave --port out for a free one") from None
    with server:
        write(f"the studio is at http://{LOOPBACK}:{server.server_address[1]}/ (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
