"""Ranks are processes: messages travel through torch.distributed."""
