"""Replicas of a pipeline: gradients added or sharded over them, and checks that they stay copies."""
