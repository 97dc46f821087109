"""A timeline with its name: its sizes and its memory in words, and the scale on which several are drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from view.simulated import run

from penstock.view.run import Run, common_scale, held_peaks


def test_memory_is_counted_in_whole_rank_microbatches() -> None:
    """A microbatch in one of a rank's two stages is half of one."""
    assert held_peaks(run("gpipe", 4, 6).timeline) == [6.0] * 4
    assert held_peaks(run("1f1b", 4, 6).timeline) == [4.0, 3.0, 2.0, 1.0]
    assert max(held_peaks(run("zb-v", 4, 6).timeline)) == 4.0
    assert run("1f1b", 4, 6).memory_text == "4 whole-rank microbatches"
    assert run("1f1b", 1, 1).memory_text == "1 whole-rank microbatch"


def test_where_bytes_are_known_the_rank_with_the_most_of_them_counts() -> None:
    named = run("1f1b", 4, 6)._replace(activation=(1e6, 1e6, 1e6, 9e6))
    assert named.memory_text == named._replace(activation=(9e6, 0.0, 0.0, 9e6 / 4)).memory_text.replace("36", "9")
    assert named.memory_text.startswith("9 MB")


def test_sizes_are_words() -> None:
    assert run("1f1b", 1, 1).sizes == "1 rank, 1 stage, 1 microbatch"
    assert run("zb-v", 2, 3).sizes == "2 ranks, 4 stages, 3 microbatches"


def test_runs_are_drawn_by_the_longest_and_not_where_their_times_are_of_different_kinds() -> None:
    short, long = run("1f1b", 2, 2), run("1f1b", 2, 8)
    assert common_scale([short, long]) == pytest.approx(long.timeline.makespan)
    measured = Run("measured", replace(long.timeline, unit="s"))
    assert common_scale([short, measured]) == 0.0
    assert common_scale([]) == 0.0
