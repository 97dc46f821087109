"""What the ranks of one run share and nobody else has: by it they know each other's words from a stranger's.

A launcher hands it to its ranks in the environment, where only the same user can read it: `penstock train` draws one
for each run. Under torchrun it is the user's to set, the same on every host: `PENSTOCK_SECRET`, or the name of a file
in `PENSTOCK_SECRET_FILE`. Without one, whatever reaches the run's store or its connections counts as a rank of it. It
never travels: what a rank says carries a code (HMAC) that cannot be made without it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from functools import lru_cache

from penstock.errors import UsageError

VARIABLE, FILE_VARIABLE = "PENSTOCK_SECRET", "PENSTOCK_SECRET_FILE"
CODE_BYTES = 32
SHORTEST = 16


@lru_cache(maxsize=1)
def _secret() -> bytes:
    """Return the run's secret; empty where none is set."""
    path = os.environ.get(FILE_VARIABLE)
    found = os.environ.get(VARIABLE, "").encode()
    if path:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid not in (os.getuid(), 0):
                    raise UsageError(
                        f"{FILE_VARIABLE}={path}: others may read it, or it is not yours; chmod 600 a file of your own"
                    )
                found = file.read(4096).strip()
                if not found:
                    raise UsageError(f"{FILE_VARIABLE}={path}: the file is empty; openssl rand -hex 32 makes a secret")
        except OSError as error:
            raise UsageError(f"{FILE_VARIABLE}={path}: {error.strerror}") from error
    if found and len(found) < SHORTEST:
        raise UsageError(f"the run's secret has {len(found)} characters; take at least {SHORTEST}, drawn at random")
    return found


def has_secret() -> bool:
    return bool(_secret())


def code_of(content: bytes, key: bytes = b"") -> bytes:
    """Compute the code that shows that a rank of this run wrote `content`; `key` keeps uses apart."""
    return hmac.digest(hashlib.sha256(_secret() + key).digest(), content, "sha256")


def is_ours(content: bytes, code: bytes, key: bytes = b"") -> bool:
    """Return whether a rank of this run made the code."""
    return hmac.compare_digest(code_of(content, key), code)


def signed(content: bytes, key: bytes = b"") -> bytes:
    """Return the content with its code before it."""
    return code_of(content, key) + content


def unsigned(content: bytes, key: bytes = b"") -> bytes | None:
    """Return the content without its code; None where the code is wrong."""
    code, rest = content[:CODE_BYTES], content[CODE_BYTES:]
    return rest if is_ours(rest, code, key) else None
