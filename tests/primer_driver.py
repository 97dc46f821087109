"""Runs programs of the primer one after the other in this process, which loads torch once: `python primer_driver.py`.

Standard input has a JSON list of [file, number of ranks]. Before each program a line with a mark is printed, and
after it another, with what it exited with. The processes of each program are forked from here, as in a real run.
"""

import json
import multiprocessing
import runpy
import sys
from pathlib import Path

MARK = "=== primer driver"

if __name__ == "__main__":
    for file, ranks in json.load(sys.stdin):
        folder = str(Path(file).parent)
        for shared in ("launch", "alone"):
            sys.modules.pop(shared, None)
        sys.path.insert(0, folder)
        sys.argv = [file, str(ranks)]
        print(f"{MARK} begin {file}", flush=True)
        said = ""
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as end:
            said = str(end.code)
        sys.path.remove(folder)
        assert not multiprocessing.active_children(), f"{file} has left processes behind"
        print(f"{MARK} end {json.dumps(said)}", flush=True)
