"""When a run ends by itself."""

from __future__ import annotations

import math

from penstock.train.config.settings import Evaluation
from penstock.train.early_stopping import EarlyStopping


def seen(stopping: EarlyStopping, losses: list[float]) -> list[tuple[bool, bool]]:
    return [(stopping.see(step, loss), stopping.over) for step, loss in enumerate(losses, start=1)]


def test_it_waits_for_a_loss_that_is_lower_by_enough() -> None:
    stopping = EarlyStopping(Evaluation(patience=2, min_delta=0.1))
    lowest, over = zip(*seen(stopping, [3.0, 2.95, 2.85, 2.84, math.nan, 2.8]), strict=True)
    assert lowest == (True, True, True, True, False, True)
    assert over == (False, False, False, False, True, True)  # 2.85 beats 3.0 by enough, 2.84 and NaN do not beat 2.85
    assert (stopping.lowest, stopping.lowest_step) == (2.8, 6)
    assert (
        "3 evaluations without a validation loss by 0.1 below 2.8500; the lowest is 2.8000, of step 6" in stopping.words
    )
    patient = EarlyStopping(Evaluation())
    assert not any(over for _, over in seen(patient, [1.0, 2.0, 3.0, 4.0]))


def test_it_goes_on_where_it_was() -> None:
    losses = [3.0, 2.0, 2.5, 2.4, 2.3]
    straight = EarlyStopping(Evaluation(patience=3))
    wanted = seen(straight, losses)
    parted, resumed = (EarlyStopping(Evaluation(patience=3)) for _ in range(2))
    seen(parted, losses[:3])
    resumed.load_state_dict(parted.state_dict())
    assert [(resumed.see(step, losses[step - 1]), resumed.over) for step in (4, 5)] == wanted[3:]
    assert resumed.over
    assert resumed.state_dict() == straight.state_dict()
