"""What ranks tell each other besides tensors: in which form it travels, and how they prove who they are."""
