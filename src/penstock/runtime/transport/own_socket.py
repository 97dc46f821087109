"""Unix sockets that only their own user reaches, and that leave nothing behind.

An abstract socket has no permissions: whoever is on the host may connect and fill its queue. A file has them, but stays
on disk when its process is killed. So a socket is bound to a file in a folder that only this user may enter, opened
there (a descriptor that only names it), and file and folder are removed at once. From then on it is reached through
that descriptor alone, as `/proc/PROCESS/fd/NUMBER`, and the kernel lets only processes of the same user pass there.
Where that is not to be had (`/proc` of another container, say), the ranks take torch.distributed.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from contextlib import suppress

from penstock.errors import UsageError
from penstock.runtime.transport.forks import close_in_forks

MEMORY = "/dev/shm"  # a file system of this host, which takes sockets; a temporary folder may be on another one


class OwnSocket(socket.socket):
    """A bound Unix socket; `address` is what others of the same user reach it by, see `path_of`."""

    _name = -1  # the descriptor of its file

    def __init__(self, kind: int) -> None:
        super().__init__(socket.AF_UNIX, kind)
        close_in_forks(self)
        try:
            self._name = self._bind()
        except OSError as error:
            self.close()
            raise UsageError(
                f"no Unix socket can be made in {MEMORY} or {tempfile.gettempdir()}, and ranks of one host meet over "
                f"those ({error}); set TMPDIR to a folder of this host that you may write to, or choose "
                f"transport='distributed'"
            ) from error
        self.address = f"{os.readlink('/proc/self')}/{self._name}"

    def _bind(self) -> int:
        """Return a descriptor of the file, which is gone again."""
        folder = tempfile.mkdtemp(prefix="penstock-", dir=MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None)
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        path = f"/proc/self/fd/{inside}/socket"  # short enough, whatever the folder's name
        try:
            self.bind(path)
            os.chmod(path, 0o600)
            return os.open(path, os.O_PATH)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.close(inside)
            os.rmdir(folder)

    def close(self) -> None:
        name, self._name = self._name, -1
        if name >= 0:
            os.close(name)
        super().close()


def path_of(address: str) -> str:
    """Return where a socket of that address is connected to; an address may come from a stranger."""
    if re.fullmatch(r"[0-9]{1,10}/[0-9]{1,10}", address) is None:
        raise ConnectionError(f"{address[:40]!r} is not the address of a rank")
    process, name = address.split("/")
    return f"/proc/{process}/fd/{name}"
