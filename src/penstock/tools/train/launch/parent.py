"""No orphans: ranks end when what launched them does, by whatever means and in whatever state they are.

Kept light, because a rank asks for it before it loads torch.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent goes, stopped or stuck as it may be."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with(launcher: int) -> None:
    """End this process when the launcher is gone; its parent may be a fork server, so a thread waits for both."""
    parent = os.getppid()
    die_with_parent()
    try:
        ended = os.pidfd_open(launcher)
    except ProcessLookupError:
        os._exit(1)
    except (OSError, AttributeError):  # a kernel older than 5.3
        return
    if os.getppid() != parent:  # The parent ended before it could be watched.
        os._exit(1)
    threading.Thread(target=_wait_and_die, args=(ended,), name="penstock-launcher", daemon=True).start()


def _wait_and_die(ended: int) -> None:
    select.select([ended], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
