"""Training beyond the step: checkpoints that resume exactly, and the command's loop, which outlives its failures."""
