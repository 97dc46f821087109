"""The random generators of a process go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from train_runs import Run

import penstock


def test_every_generator_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    import random

    import numpy

    def drawn() -> list[Any]:
        return [torch.rand(2).tolist(), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.normal()]

    before = numpy.random.get_bit_generator()
    for generator in (numpy.random.MT19937(3), numpy.random.PCG64(4)):
        numpy.random.set_bit_generator(generator)
        try:
            drawn()  # an odd number of normal ones: half a pair is kept inside
            penstock.save(tmp_path / type(generator).__name__, run.pipe)
            want = drawn()
            drawn()
            assert penstock.load(tmp_path / type(generator).__name__, run.pipe).generators == "own"
            assert drawn() == want
        finally:
            numpy.random.set_bit_generator(before)
