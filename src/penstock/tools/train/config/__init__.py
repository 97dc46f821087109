"""The configuration of a training run: read, checked, and the user's code that it names."""
