"""What ranks count in a check of `penstock doctor`."""

from __future__ import annotations

import torch

from penstock.tools.doctor.checks import HostReads


def test_a_copy_is_counted_where_the_host_waits_for_it() -> None:
    """A device without memory has every operation, so it stands for one that the host could wait for."""
    device = torch.ones(4, device="meta")
    with HostReads() as reads:
        device.copy_(torch.ones(4), non_blocking=True)
        torch.ones(4).copy_(torch.ones(4))
        (device + device).sum()
        assert not reads.found
        device.copy_(torch.ones(4))
        assert dict(reads.found) == {"copy_": 1}
