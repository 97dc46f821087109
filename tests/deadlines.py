"""How long tests wait for what must come at once, and the timeouts that it is told apart from.

A machine may be busy with other things, so these say "at once and not at the timeout" and nothing about speed: how many
seconds a failure takes to reach all ranks is measured by `penstock bench failures`.
"""

from __future__ import annotations

SOON = 40.0  # seconds in which every rank must know
TIMEOUT = 90.0  # of a pipeline or transport whose timeout is not what is tested
