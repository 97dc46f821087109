"""`GPipe`: a module that is called like the one it wraps, and runs as a pipeline forward and backward."""
