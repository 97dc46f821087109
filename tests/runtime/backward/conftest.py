"""What the tests of backwards run under."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def without_onednn() -> Any:
    """oneDNN's kernels for 16-bit floats use AMX, which virtual machines announce and then refuse."""
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags also touches TF32, and warns of it
    yield
    torch._C._set_mkldnn_enabled(True)
