"""Penstock: pipeline-parallel training for PyTorch, with the schedule as a value."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
