"""Uneven reality: layers, ranks, links and microbatches that differ."""
