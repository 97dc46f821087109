"""Where the tensors of a message lie: what is not plain memory is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import UsageError
from penstock.runtime.transport.layout.layout import Layout, flatten


@pytest.mark.filterwarnings("ignore")  # torch's, of what is in beta or leaves
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda dense: dense.to_sparse(), "torch.sparse_coo"),
        (lambda dense: dense.to_sparse_csr(), "torch.sparse_csr"),
        (lambda dense: dense.to_mkldnn(), "torch._mkldnn"),
        (lambda dense: dense.to("meta"), "meta"),
        (lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), "quantised"),
        (lambda dense: torch.nested.nested_tensor([dense, dense]), "nested"),
        (lambda dense: torch.nested.nested_tensor([dense, dense], layout=torch.jagged), "nested"),
    ],
)
def test_what_is_not_dense_is_refused_by_name_also_after_dense_ones(make: Any, kind: str) -> None:
    dense = torch.ones(4, 3)
    odd = make(dense)
    if kind != "nested":  # it has no shape to compare
        assert Layout.of(flatten(dense), False).fits(odd) is None
    with pytest.raises(UsageError, match=f"a {kind} tensor cannot cross"):
        Layout.of(flatten(odd), False)
