"""In which order microbatches of different sizes go through a pipeline.

Small ones first, so that the last rank gets to work early; the large ones in the middle, where every rank has other
work to do while they pass; and small ones last, so that nobody waits long for the last to come back. The sizes rise
with every second microbatch and fall with the others. There are two ways to do that: the smallest comes first, or last.
Where one is far larger than the others, it may do better with more of them before it: then the sizes fall with every
third one only.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["late_peak", "sequences"]


def sequences(sizes: Sequence[float]) -> list[list[int]]:
    """Orders worth trying, the likeliest first; of equal sizes, the order that there is."""
    count = len(sizes)
    if len(set(sizes)) == 1:
        return [list(range(count))]
    order = sorted(range(count), key=sizes.__getitem__)
    return [order[1::2] + order[0::2][::-1], order[0::2] + order[1::2][::-1]]


def late_peak(sizes: Sequence[float]) -> list[int]:
    """The largest when two thirds of the others have gone."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    falling = order[:-1:3]
    return [*(number for number in order if number not in falling), *reversed(falling)]
