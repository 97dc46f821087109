"""After a chat was rendered, a later capture of a model never ended: a loop in the interpreter itself, at full load.

The limit for chat templates raises in a thread from outside, and took back what it had not raised. Python 3.11 marks
such a call as something to come, and nothing came. Under a profiler, which captures use, it then waits for ever.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from penstock.tools.train.data.time_limit import time_limit

with time_limit(100.0, lambda: "it"):
    pass
sys.setprofile(lambda *_: None)
print(sum(each for each in range(10)))
"""


def test_a_profiler_goes_on_after_a_limit_that_was_kept() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "45\n"
