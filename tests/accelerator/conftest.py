"""The tests here need the device: it is built for the first of them, unless the set-up has built it ahead."""

import pytest
from accelerator.harness import require_device


@pytest.fixture(autouse=True, scope="session")
def _device_is_built() -> None:
    require_device()
