"""The same seed and effort give the same answer: in any process, with any hash seed, on a machine at any load."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, threading

from penstock.schedule import Costs, Hosts, Layer, build, search_curve, search_report

stop = threading.Event()
if sys.argv[1] == "busy":  # a thread that takes half of this process's time
    def work():
        while not stop.is_set():
            sum(range(2000))
    threading.Thread(target=work, daemon=True).start()

costs = Costs(forward=1.0, input=1.1, weight=0.7, hop=0.1)
layers = [Layer(1.0, 1.1, 0.7)] * 13 + [Layer(2.4)]
found = [
    search_report(4, 9, costs, 3, effort=400, seed=5),
    search_report(3, 8, Costs(kept=0.1, hop=0.1), 1.5, effort=300, recompute=True),
    search_report(4, 20, layers=layers, speeds=[1, 0.7, 1, 1], links=Hosts((2, 2), 0.1, 0.8), memory=24, effort=150),
    search_report(3, 6, layers=layers, skips=[(0, 9)], vocabulary=True, effort=60),
    search_report(3, 6, Costs(sizes=[1, 2, 1, 3, 1, 1], hop=0.1), effort=60),
    *(point.found for point in search_curve(3, 6, costs, [1, 2, 3], effort=200)),
]
answers = [(each.value, each.schedule.draw(), [str(tried) for tried in each.tried]) for each in found]
answers.append(build("v-half", 4, 8, costs=costs).draw())
stop.set()
print(json.dumps(answers))
"""


def answers(hash_seed: str, load: str) -> list[object]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, load], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert finished.returncode == 0, finished.stderr
    found: list[object] = json.loads(finished.stdout)
    return found


@pytest.mark.slow
def test_processes_with_other_hash_seeds_and_loads_find_the_same() -> None:
    first = answers("0", "idle")
    assert len(first) == 9
    assert answers("1", "idle") == first
    assert answers("31", "busy") == first
