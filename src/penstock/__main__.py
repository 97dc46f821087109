"""`python -m penstock`, which is also what torchrun starts: `torchrun ... -m penstock train CONFIG`."""

import os
import sys

if sys.path[:1] == [os.getcwd()]:  # `python -m` searches the working folder first, where anybody's json.py may lie
    del sys.path[0]

from penstock.tools.train.launch.stopping import die_with_parent

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # torchrun's agent, which may go while all the rest is being loaded

    from penstock.cli import main

    main()
