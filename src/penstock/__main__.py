"""`python -m penstock`, which is also what torchrun starts: `torchrun ... -m penstock train CONFIG`."""

import os

from penstock.train.launch.parent import die_with_parent

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # torchrun's agent, which may go while all the rest is being loaded

    from penstock.cli import main

    main()
