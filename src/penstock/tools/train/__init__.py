"""The training command: configuration, data, processes and the loop."""
