"""Schedules and timelines as text: drawings, CSV and JSON files."""
