"""Splitting without tracing: every stage runs the model's own forward, with ghosts for the rest."""
