"""The ranks of a pipeline as a group: where they run, and what must be alike on all of them."""
