"""Saving: what is collected from each process, who writes what, and the write itself."""
