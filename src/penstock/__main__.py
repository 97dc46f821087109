"""`python -m penstock`, which is also what torchrun starts: `torchrun ... -m penstock train CONFIG`."""

from penstock.cli import main

if __name__ == "__main__":
    main()
