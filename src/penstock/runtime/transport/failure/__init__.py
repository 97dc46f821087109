"""How a lost, stalled or failed rank is noticed, named and reported to all others."""
