"""Trainers that people use, on a pipeline: each in a module of its own that needs its library installed."""
