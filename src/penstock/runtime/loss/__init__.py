"""The loss of a batch from the losses of its microbatches: weights, shares, checks."""
