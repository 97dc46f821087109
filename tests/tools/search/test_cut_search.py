"""Cut, placement and order in one call: what comes back is proved, fits, and is as good as was promised."""

from __future__ import annotations

import random

import pytest

from penstock.schedule import Costs, FoundCut, Hosts, Layer, Schedule, lower, search_report, simulate, verify


def checked(found: object, memory: float | None = None) -> FoundCut:
    """The answer, once it is proved and its value is the simulator's."""
    assert isinstance(found, FoundCut)
    verify(lower(found.schedule))
    timeline = simulate(found.schedule, found.costs)
    assert timeline.makespan == pytest.approx(found.value)
    assert found.lower_bound <= found.value * (1 + 1e-9)
    if memory is not None:
        assert max(timeline.peak_memory) <= memory * (1 + 1e-9)
    return found


def idle(found: FoundCut, work: float) -> float:
    """The share of all ranks' time that is not work."""
    return 1 - work / (found.schedule.ranks * found.value)


def test_a_heavy_output_layer_gets_a_rank_with_few_others() -> None:
    found = checked(search_report(4, 12, layers=[*[1] * 16, 2.4], effort=150))
    assert sum(found.counts) == 17
    assert idle(found, 12 * 3 * 18.4) <= 0.16


def test_split_over_all_ranks_it_costs_next_to_nothing() -> None:
    found = checked(search_report(4, 12, layers=[*[1] * 16, 2.4], vocabulary=True, memory=17, effort=100), 17)
    assert sum(found.shares) == pytest.approx(1)
    assert sum(found.counts) == 16
    assert found.schedule.stages == len(found.counts) + 4 + 1
    assert idle(found, 12 * 3 * 18.4) <= 0.06


def test_no_rank_starts_on_the_output_layer_before_the_barrier() -> None:
    found = checked(search_report(2, 4, layers=[1, 1, 1, 1, 2], vocabulary=True, stages_per_rank=1, effort=20))
    last = found.schedule.stages - 1
    spans = {str(span.action): span for span in simulate(found.schedule, found.costs).spans}
    for microbatch in range(4):
        barrier = spans[f"{last}F{microbatch}"]
        for part in (last - 2, last - 1):
            assert spans[f"{part}F{microbatch}"].end <= barrier.start
            assert spans[f"{part}I{microbatch}"].start >= barrier.end


def test_slow_ranks_have_less_to_do() -> None:
    speeds = [1, 1 / 1.4, 1, 1 / 1.2]
    found = checked(search_report(4, 12, layers=[1] * 24, speeds=speeds, effort=150))
    assert found.value <= 1.02 * max(found.lower_bound, 12 * 3 * 24 / sum(speeds))


def test_a_slow_link_is_crossed_seldom_without_a_guess_of_the_stages() -> None:
    links = Hosts((2, 2), inside=0.0, between=1.0)
    layers = [Layer(0.25, 0.25, 0.125)] * 16
    found = checked(search_report(4, 12, layers=layers, links=links, memory=16, effort=200), 16)
    fixed = search_report(4, 12, Costs(1, 1, 0.5, links=links.matrix()), 4, stages_per_rank=4, effort=200)
    assert found.value < 0.9 * fixed.value


def test_skips_take_their_time_on_links() -> None:
    layers = [Layer(1.0, bytes=1.0) for _ in range(8)]
    links = [[0.0, 0.8], [0.8, 0.0]]
    plain = checked(search_report(2, 6, layers=layers, links=links, stages_per_rank=2, effort=40))
    skipping = checked(search_report(2, 6, layers=layers, links=links, skips=[(0, 7)], stages_per_rank=2, effort=40))
    assert not skipping.schedule.topology.is_chain or len(skipping.counts) == 2
    assert skipping.value >= plain.value * (1 - 1e-9)


def test_recomputing_is_part_of_the_choice() -> None:
    layers = [Layer(1.0, kept=0.05) for _ in range(8)]
    never = checked(search_report(2, 8, layers=layers, memory=4.5, effort=60), 4.5)
    free = checked(search_report(2, 8, layers=layers, memory=4.5, recompute=True, effort=120), 4.5)
    assert free.schedule.recompute
    assert free.value < never.value


def test_the_same_effort_gives_the_same_answer() -> None:
    def once() -> tuple[Schedule, tuple[int, ...]]:
        found = search_report(3, 6, layers=[1, 2, 1, 3, 1, 2, 2], speeds=[1, 0.8, 1], effort=60)
        assert isinstance(found, FoundCut)
        return found.schedule, found.counts

    assert once() == once()


def test_the_cut_runs_with_another_number_of_microbatches() -> None:
    found = checked(search_report(2, 4, layers=[1] * 6, memory=6, effort=30))
    other = found.with_microbatches(7)
    verify(lower(other))
    assert (other.placement, other.microbatches) == (found.schedule.placement, 7)
    assert max(simulate(other, found.costs).peak_memory) <= 6


def test_any_layers_and_ranks_give_a_proved_schedule() -> None:
    generator = random.Random(3)
    for _ in range(12):
        ranks, count = generator.randint(1, 4), generator.randint(1, 6)
        layers = [
            Layer(generator.uniform(0.2, 2), activation=generator.uniform(0, 2), state=generator.random())
            for _ in range(generator.randint(ranks + 1, 12))
        ]
        memory = sum(layer.activation + layer.state for layer in layers) + 1
        links = [[generator.random() for _ in range(ranks)] for _ in range(ranks)]
        found = search_report(
            ranks,
            count,
            layers=layers,
            speeds=[generator.uniform(0.5, 1.5) for _ in range(ranks)],
            links=links,
            memory=memory,
            vocabulary=generator.random() < 0.5,
            skips=[(0, len(layers) - 2)] if generator.random() < 0.5 and len(layers) > 3 else [],
            effort=20,
        )
        checked(found, memory)


@pytest.mark.exhaustive
def test_the_figures_of_eight_ranks_and_24_microbatches() -> None:
    """Heavy output layer, slow ranks and a slow link, each in one call."""
    head = [*[1] * 32, 2.4]
    assert idle(checked(search_report(8, 24, layers=head, effort=200)), 24 * 3 * 34.4) <= 0.16
    split = checked(search_report(8, 24, layers=head, vocabulary=True, memory=33, effort=120), 33)
    assert idle(split, 24 * 3 * 34.4) <= 0.05
    speeds = [1, 1, 1 / 1.4, 1, 1, 1 / 1.2, 1, 1]
    found = checked(search_report(8, 24, layers=[1] * 32, speeds=speeds, effort=250))
    assert found.value <= 1.02 * found.lower_bound
    layers, links = [Layer(0.25, 0.25, 0.125)] * 32, Hosts((4, 4), 0.0, 0.9)
    assert checked(search_report(8, 24, layers=layers, links=links, memory=32, effort=400), 32).value <= 72.7
