"""Tensors spread over ranks: which layers, how, and how such values cross between stages."""
