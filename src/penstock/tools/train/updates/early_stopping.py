"""What evaluations have shown so far: the lowest loss, and whether there is still hope for a lower one."""

from __future__ import annotations

import math
from typing import Any

from penstock.tools.train.config.settings import Evaluation


class EarlyStopping:
    """Counts evaluations without a lower loss. All ranks see the same losses, so all come to the same end."""

    def __init__(self, options: Evaluation) -> None:
        self._options = options
        self.lowest = math.inf
        self.lowest_step = 0
        self._to_beat = math.inf  # the last loss that was lower by min_delta
        self._waited = 0  # evaluations since then

    def see(self, step: int, loss: float) -> bool:
        """Take the loss of an evaluation; returns whether it is the lowest so far."""
        if loss < self._to_beat - self._options.min_delta:
            self._to_beat, self._waited = loss, 0
        else:  # NaN as well
            self._waited += 1
        if not loss < self.lowest:
            return False
        self.lowest, self.lowest_step = loss, step
        return True

    @property
    def over(self) -> bool:
        """Whether the run ends here."""
        return self._options.patience is not None and self._waited >= self._options.patience

    @property
    def words(self) -> str:
        """Why it ends."""
        less = f" by {self._options.min_delta:g}" if self._options.min_delta else ""
        return (
            f"{self._waited} evaluations without a validation loss{less} below {self._to_beat:.4f}; the lowest is "
            f"{self.lowest:.4f}, of step {self.lowest_step} (evaluation.patience is {self._options.patience})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "lowest": self.lowest,
            "lowest_step": self.lowest_step,
            "to_beat": self._to_beat,
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.lowest, self.lowest_step = float(state["lowest"]), int(state["lowest_step"])
        self._to_beat, self._waited = float(state["to_beat"]), int(state["waited"])
