"""The secret that signs messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.runtime.messages import secret


def test_a_secret_that_others_could_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef")
    path.chmod(0o644)
    monkeypatch.setenv(secret.FILE_VARIABLE, str(path))
    for mode, problem in ((0o644, "chmod 600"), (0o600, "")):
        path.chmod(mode)
        secret._secret.cache_clear()
        if problem:
            with pytest.raises(PenstockError, match=problem):
                secret.has_secret()
        else:
            assert secret.has_secret()
            assert secret.unsigned(secret.signed(b"words")) == b"words"
            assert secret.unsigned(b"0" * secret.CODE_BYTES + b"words") is None
    path.write_text("\n")
    secret._secret.cache_clear()
    with pytest.raises(PenstockError, match="the file is empty"):
        secret.has_secret()
    secret._secret.cache_clear()
