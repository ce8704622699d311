"""A drawing of lines and dots over two axes, as SVG text. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10
from pathlib import Path

from adaptc.errors import OutputError

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 40, 52
LEGEND, LEGEND_COLUMNS, LEGEND_WIDTH = 20, 2, 330
COLOURS = ("#1f5fa8", "#b4541a", "#2b8a3e", "#7b3fa0", "#8a6d00", "#a3195b", "#00818a", "#555555")
"""Told apart by people who don't see red or green, too; lines beyond the last begin again."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """What is drawn along an edge: [low, high], equal steps or, with ``log``, equal ratios (both > 0 then). ``whole``:
    counts, with nothing between whole numbers."""

    label: str
    low: float
    high: float
    log: bool = False
    whole: bool = False

    @staticmethod
    def over(label: str, values: Iterable[float], log: bool = False, whole: bool = False) -> Axis:
        """An axis that holds all values: from whole decades to whole decades, or from 0 to a round number."""
        values = list(values) or [1.0]
        if log:
            low, high = floor(log10(min(values))), ceil(log10(max(values)))
            return Axis(label, 10.0**low, 10.0 ** max(high, low + 1), True)
        most = max(values) or 1.0
        step = _step(most, whole)
        return Axis(label, 0.0, step * ceil(most / step - 1e-9), False, whole)

    def part(self, value: float) -> float:
        """Where a value stands: 0 at low, 1 at high. Values outside stand at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _step(self.high - self.low, self.whole)
            return [self.low + i * step for i in range(int((self.high - self.low) / step + 1.5))]
        decades = range(round(log10(self.low)), round(log10(self.high)) + 1)
        within = (1,) if len(decades) > 4 else (1, 2, 5)
        ticks = [m * 10.0**power for power in decades[:: max(1, len(decades) // 8)] for m in within]
        return [t for t in ticks if self.low * 0.999 <= t <= self.high * 1.001]


@dataclass
class Chart:
    """Collects lines and dots; ``svg`` draws them. What has a label is listed above the drawing, in its colour."""

    title: str
    x: Axis
    y: Axis
    _marks: list[str] = field(default_factory=list)
    _labels: list[tuple[str, str]] = field(default_factory=list)
    _words: list[tuple[float, float, float]] = field(default_factory=list)

    def line(self, points: Sequence[Point], colour: str, label: str = "", dashed: bool = False) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._place, points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._marks.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')
        self._name(label, colour)

    def dot(self, point: Point, colour: str, radius: float = 3.0, title: str = "", label: str = "") -> None:
        """``title`` shows when a pointer rests on the dot."""
        x, y = self._place(point)
        self._marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colour}" fill-opacity="0.8">'
                           f"<title>{escape(title)}</title></circle>")
        self._name(label, colour)

    def text(self, point: Point, words: str, colour: str = "#222") -> None:
        """Words beside a point, where no others stand; those of points far to the right end there."""
        x, y = self._place(point)
        width = 6.4 * len(words)
        end = x + width > WIDTH - 4
        left = x - width if end else x
        for shift in (-6, 16, -20, 30, -34, 44, -48):
            if not any(abs(y + shift - at) < 13 and left < right and start < left + width
                       for start, right, at in self._words):
                break
        self._words.append((left, left + width, y + shift))
        anchor = ' text-anchor="end"' if end else ""
        self._marks.append(f'<text x="{x:.1f}" y="{y + shift:.1f}" fill="{colour}"{anchor}>{escape(words)}</text>')

    def svg(self) -> str:
        shift = self._shift()
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + shift}" '
                 'font-family="sans-serif" font-size="12" fill="#222">',
                 f'<rect width="{WIDTH}" height="{HEIGHT + shift}" fill="white"/>',
                 f'<text x="{LEFT}" y="22" font-size="15">{escape(self.title)}</text>']
        for number, (label, colour) in enumerate(self._labels):
            x, y = LEFT + number % LEGEND_COLUMNS * LEGEND_WIDTH, TOP + LEGEND * (number // LEGEND_COLUMNS)
            parts.append(f'<circle cx="{x + 4}" cy="{y}" r="4" fill="{colour}"/>'
                         f'<text x="{x + 14}" y="{y + 4}">{escape(label)}</text>')
        parts.append(f'<g transform="translate(0 {shift})">')
        for tick in self.y.ticks():
            _, at = self._place((self.x.low, tick))
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e2e2e2"/>'
                         f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
        for tick in self.x.ticks():
            at, _ = self._place((tick, self.y.low))
            parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_number(tick)}</text>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts += [f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(self.x.label)}'
                  "</text>",
                  f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle">{escape(self.y.label)}'
                  "</text>",
                  *self._marks, "</g>", "</svg>", ""]
        return "\n".join(parts)

    def write(self, path: Path) -> None:
        """OutputError says why the file can't be written."""
        try:
            path.write_text(self.svg(), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path} can't be written: {error.strerror}.") from error

    def _name(self, label: str, colour: str) -> None:
        if label and (label, colour) not in self._labels:
            self._labels.append((label, colour))

    def _shift(self) -> int:
        """Room that the list of labels takes."""
        return LEGEND * -(-len(self._labels) // LEGEND_COLUMNS)

    def _place(self, point: Point) -> Point:
        x, y = point
        return (LEFT + self.x.part(x) * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - self.y.part(y) * (HEIGHT - TOP - BOTTOM))


def _step(span: float, whole: bool) -> float:
    """A round step that divides a span into four to ten, or fewer where there is nothing between ``whole`` numbers."""
    power = 10.0 ** floor(log10(span))
    step = next(m * power for m in (0.1, 0.2, 0.5, 1.0) if span / (m * power) <= 10)
    return max(step, 1.0) if whole else step


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e6 else f"{value:g}"
