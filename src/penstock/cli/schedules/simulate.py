"""`penstock simulate`: what a schedule takes under stated costs, and where the time goes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from penstock.cli.output import fold, guarded, number, terminal_width, working, write, write_json
from penstock.cli.schedules.costs import CostOptions, amount
from penstock.cli.source import (
    AsJson,
    Sizes,
    Source,
    Steps,
    check_steps,
    count,
    described,
    identity,
    option,
    read_proved,
)
from penstock.schedule import Costs, Span, Spread, SteadyState, Timeline, steady_state, what_if
from penstock.schedule import simulate as price
from penstock.schedule.files.drawing import table
from penstock.schedule.repeated import repeated
from penstock.view.figures import percent

PATH_ENDS = 8  # actions of the critical path that are shown at either end

Jitter = Annotated[
    str, option("Relative spread of each compute's time, such as 0.1.", metavar="SHARE", show_default=False)
]
Draws = Annotated[int, count("How many times the jitter is drawn.")]
Seed = Annotated[int, count("Where the random numbers start.", least=0)]


@guarded
def simulate(
    source: Source,
    sizes: Sizes,
    given: CostOptions,
    steps: Steps = 1,
    jitter: Jitter = "0",
    draws: Draws = 100,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Price a schedule: makespan, idle share, peak memory and critical path.

    Times are in any unit, the same for all; so is memory. Overlapped pairs are priced one part after the other
    unless --overlap says what they take. With --steps, all but the steady state is of that many steps together.
    """
    share = amount("--jitter", jitter)
    schedule = read_proved(source, sizes)
    costs = given.read(schedule.stages)
    check_steps(schedule, steps)
    with working(f"simulating {source}"):
        together = repeated(schedule, steps)
        timeline, steady = price(together, costs), steady_state(schedule, costs)
        spread = what_if(together, costs, jitter=share, draws=draws, seed=seed) if share else None
    draw = {"jitter": share, "draws": draws, "seed": seed}
    if as_json:
        write_json({**identity(schedule), "steps": steps, **_document(costs, timeline, steady, spread, draw)})
    else:
        of = f"; {steps} steps back to back" if steps > 1 else ""
        _report(f"{described(schedule, source)}; {_stated(costs)}{of}", timeline, steady, spread, draw)


def _report(title: str, timeline: Timeline, steady: SteadyState, spread: Spread | None, draw: dict[str, Any]) -> None:
    columns = terminal_width()
    write(fold(title, columns))
    write(f"\nmakespan    {number(timeline.makespan)}")
    write(f"idle share  {percent(timeline.bubble)}")
    write(f"steady      {number(steady.period)} per step, idle {percent(steady.idle)}, where steps overlap")
    if spread is not None:
        write(
            f"jitter      {number(draw['jitter'])} over {draw['draws']} draws (seed {draw['seed']}): makespan "
            f"{number(spread.mean)} +- {number(spread.deviation)}, {number(spread.low)} to {number(spread.high)}"
        )
    write(f"\n{_by_rank(timeline)}\n")
    write(fold(_path(timeline.critical_path), columns))


def _stated(costs: Costs) -> str:
    """State the costs that are not zero, in a phrase."""
    words = [f"{name} {_numbers(getattr(costs, name))}" for name in ("forward", "input", "weight")]
    if costs.hop:
        words.append(f"hop {number(costs.hop)}")
    if costs.latency:
        words.append(f"latency {number(costs.latency)}")
    if costs.bandwidth is not None:
        words.append(f"{_numbers(costs.bytes)} bytes at {number(costs.bandwidth)} a unit of time")
    if costs.overlap is not None:
        words.append(f"pairs {_numbers(costs.overlap)} of their parts' sum")
    return ", ".join(words)


def _numbers(value: Any) -> str:
    return ",".join(map(number, value)) if isinstance(value, tuple) else number(value)


def _by_rank(timeline: Timeline) -> str:
    columns = zip(timeline.idle, timeline.peak_activations, timeline.peak_memory, strict=True)
    rows = [(str(rank), percent(idle), str(held), number(most)) for rank, (idle, held, most) in enumerate(columns)]
    return table([("rank", "idle share", "peak activations", "peak memory"), *rows])


def _path(path: tuple[Span, ...]) -> str:
    """Describe the chain that decides the makespan; of a long one both ends."""
    names = [str(span.action) for span in path]
    if len(names) > 2 * PATH_ENDS:
        names[PATH_ENDS:-PATH_ENDS] = [f"... {len(path) - 2 * PATH_ENDS} more ..."]
    return f"critical path, {len(path)} computes: {' '.join(names)}"


def _document(
    costs: Costs, timeline: Timeline, steady: SteadyState, spread: Spread | None, draw: dict[str, Any]
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "costs": asdict(costs),
        "makespan": timeline.makespan,
        "idle_share": timeline.bubble,
        "steady_period": steady.period,
        "steady_idle_share": steady.idle,
        "idle_share_by_rank": list(timeline.idle),
        "peak_activations": list(timeline.peak_activations),
        "peak_memory": list(timeline.peak_memory),
        "critical_path": [
            {"rank": span.rank, "action": str(span.action), "start": span.start, "end": span.end}
            for span in timeline.critical_path
        ],
    }
    if spread is not None:
        figures = {name: getattr(spread, name) for name in ("mean", "deviation", "low", "high")}
        document["what_if"] = {**draw, **figures, "makespans": list(spread.makespans)}
    return document
