"""A differential fuzz: random models, losses, batches and schedules, as a plain loop and as a pipeline.

See `__main__.py` for the command.
"""
