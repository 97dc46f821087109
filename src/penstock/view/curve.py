"""The loss over the steps of a run, as SVG inside the page: it follows the page's colours and needs no script.

Of many steps, each column of the drawing shows the range of its losses and their mean, so that spikes stay visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from penstock.view.figures import number

Points = Sequence[tuple[float, float]]  # steps and losses
WIDTH, HEIGHT = 800, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 12, 34
COLUMNS = 400  # The training loss is drawn at no more places.
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """The loss by step in training, and of evaluations; steps whose loss is no finite number are left out."""

    training: Points
    validation: Points = ()

    def svg(self) -> str:
        """Draw it, or return nothing where there is nothing to draw."""
        training, validation = _finite(self.training), _finite(self.validation)
        if not training and not validation:
            return ""
        return "\n".join(_Drawing(training, validation).lines())


def _finite(points: Points) -> Points:
    return [(step, value) for step, value in points if math.isfinite(value)]


class _Drawing:
    def __init__(self, training: Points, validation: Points) -> None:
        self.training, self.validation = training, validation
        both = [*training, *validation]
        self.steps = min(step for step, _ in both), max(step for step, _ in both)
        self.marks = _ticks(min(value for _, value in both), max(value for _, value in both))

    def x(self, step: float) -> float:
        first, last = self.steps
        return LEFT + (step - first) / max(1, last - first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def lines(self) -> Iterator[str]:
        yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.words())}" class="curve">'
        for mark in self.marks:
            y = self.y(mark)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(mark)}</text>'
        for step in dict.fromkeys(
            round(self.steps[0] + part / 4 * (self.steps[1] - self.steps[0])) for part in range(5)
        ):
            yield f'<text x="{self.x(step):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{step:,}</text>'
        yield from self._training()
        yield from self._validation()
        yield "</svg>"

    def _training(self) -> Iterator[str]:
        columns = _columns(self.training)
        if len(columns) < len(self.training):
            edge = [(step, high) for step, _, _, high in columns] + [(step, low) for step, low, _, _ in columns[::-1]]
            yield f'<polygon class="range" points="{self._path(edge)}"/>'
        if columns:
            yield f'<polyline class="training" points="{self._path([(step, mean) for step, _, mean, _ in columns])}"/>'

    def _validation(self) -> Iterator[str]:
        if not self.validation:
            return
        yield f'<polyline class="validation" points="{self._path(self.validation)}"/>'
        lowest = min(self.validation, key=lambda point: point[1])
        shown = self.validation if len(self.validation) <= COLUMNS // 4 else [lowest]
        for step, value in shown:
            kind, size = ("best", 6) if (step, value) == lowest else ("validation", 3.5)
            words = f"step {step:,}: validation {number(value)}{', the lowest' if kind == 'best' else ''}"
            yield (
                f'<circle class="{kind}" cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="{size}">'
                f"<title>{words}</title></circle>"
            )

    def _path(self, points: Points) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)

    def words(self) -> str:
        """Describe the drawing for those who hear it."""
        told = []
        if self.training:
            (first, begin), (last, end) = self.training[0], self.training[-1]
            told.append(f"training loss from {number(begin)} in step {first} to {number(end)} in step {last}")
        if self.validation:
            step, lowest = min(self.validation, key=lambda point: point[1])
            told.append(f"validation loss at the lowest {number(lowest)}, in step {step}")
        return "; ".join(told)


def _columns(points: Points) -> list[tuple[float, float, float, float]]:
    """Return (step, lowest, mean, highest) of the steps that share a column."""
    size = max(1, math.ceil(len(points) / COLUMNS))
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [
        (
            sum(step for step, _ in part) / len(part),
            min(value for _, value in part),
            sum(value for _, value in part) / len(part),
            max(value for _, value in part),
        )
        for part in parts
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose all values: 1, 2 or 5 times a power of ten apart."""
    room = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(room / TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if room / (factor * power) <= TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * place for place in range(first, max(last, first + 1) + 1)]
