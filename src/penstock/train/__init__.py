"""Training beyond the step: checkpoints that resume exactly."""
