"""A rehearsal: the real runtime of every rank, on virtual time, in one thread of one process."""
