"""A browser and a studio for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser

from penstock.view.studio import save_studio


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        found.size(1300, 2400)
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studio") / "studio.html"
    save_studio(path)
    return path
