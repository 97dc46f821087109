"""Loading: which checkpoint, what is read, and where it goes."""
