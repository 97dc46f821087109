"""What a message looks like apart from its numbers: which tensors, where they lie, encoded as bytes."""
