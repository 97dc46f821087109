"""What each process owns of the model: state dicts, what other ranks hold, and moving it."""
