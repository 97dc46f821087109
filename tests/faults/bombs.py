"""What a stranger might write where ranks read: pickles that do something when they are read, and garbage."""

from __future__ import annotations

import base64
import json
import os
import pickle
from typing import Any

from penstock.runtime.messages import secret


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def loads_of(path: str) -> list[bytes]:
    """What a stranger might write, in the forms that have been read some time."""
    bomb = pickle.dumps(Bomb(path))
    return [
        bomb,
        base64.b64encode(bomb),
        base64.b64encode(b"0" * secret.CODE_BYTES + bomb),
        b"\x00\xff" * 50,
        b"",
        b"[" * 100_000,
        json.dumps({"$PeerFailure": {"rank": "0", "cause": 1}}).encode(),
        json.dumps({"$nothing": []}).encode(),
        base64.b64encode(json.dumps({"$tuple": [1, 2, 3]}).encode()),
    ]
