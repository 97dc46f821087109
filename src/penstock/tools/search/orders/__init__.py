"""Orders of one placement: what they cost, how they are made, and how they are changed.

evaluate   what an order costs, with its weight gradients filled in
dispatch   orders made by rules
grouped    orders on a loop that go by groups of microbatches
laps       changes to the order of a loop that all ranks make alike
wave       orders on a V for steps that overlap; on the clock of `builders/clocked.py`, as `builders/rhythm.py` is
recipes    rules, groupings, rhythms and waves as values to begin with, draw and change
improve    small changes to an order
"""
