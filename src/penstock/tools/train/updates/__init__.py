"""What changes the weights: optimizer, learning rate, average, and when a step or the run must not go on."""
