"""What a `Pipeline` is given, checked before anything is built."""
