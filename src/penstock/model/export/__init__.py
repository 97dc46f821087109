"""Splitting by graph, the fallback: the model's operations, captured by torch.export, cut anywhere."""
