"""Lines as SVG: plain text, so that the same figures give the same file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 34, 74
_COLOURS = ("#1f6f8b", "#c8763a", "#6b7f3f", "#7a4f9a", "#b03a48", "#4a4a4a", "#2a9d8f", "#a9b88a")
_LOG_RATIO = 20.0  # Further apart than this, values are drawn by their logarithm.


@dataclass(frozen=True, slots=True)
class Chart:
    """`lines`: by name. `x_text` and `y_text` say a value at an axis."""

    title: str
    x_title: str
    y_title: str
    lines: Mapping[str, Points]
    x_text: Callable[[float], str] = lambda value: f"{value:g}"
    y_text: Callable[[float], str] = lambda value: f"{value:g}"


def draw(chart: Chart) -> str:
    """The file; y from 0 on, x by its logarithm where values lie far apart."""
    values = [point for line in chart.lines.values() for point in line]
    xs = sorted({x for x, _ in values}) or [0.0]
    x_of = _scale(xs)
    top = max((y for _, y in values), default=1.0) or 1.0

    def y_of(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(WIDTH / 2, 18, chart.title, 'text-anchor="middle" font-weight="bold"'),
        _text(WIDTH / 2, HEIGHT - 34, chart.x_title, 'text-anchor="middle"'),
        _text(_LEFT, _TOP - 6, chart.y_title, 'text-anchor="middle" fill="#444444"'),
    ]
    for step in range(5):
        value = top * step / 4
        y = y_of(value)
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, chart.y_text(value), 'text-anchor="end"'))
    below = HEIGHT - _BOTTOM + 16
    parts += [
        _text(x_of(value), below, chart.x_text(value), 'text-anchor="middle"')
        for value in _some(xs, 8)
    ]
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        left = _LEFT + number % 5 * 112
        parts.append(_text(left, HEIGHT - 18 + number // 5 * 12, name, f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])


def cumulative(values: Sequence[float], points: int = 200) -> list[tuple[float, float]]:
    """(value, share of all that are no larger)."""
    ordered = sorted(values)
    count = len(ordered)
    places = (
        sorted({round(step * (count - 1) / points) for step in range(points + 1)}) if count else []
    )
    return [(ordered[place], (place + 1) / count) for place in places]


def _scale(xs: Sequence[float]) -> Callable[[float], float]:
    span = WIDTH - _LEFT - _RIGHT
    low, high = xs[0], xs[-1]
    if low > 0 and high / low > _LOG_RATIO:
        return lambda x: _LEFT + span * math.log(x / low) / math.log(high / low)
    return lambda x: _LEFT + span * ((x - low) / (high - low) if high > low else 0.5)


def _some(values: Sequence[float], count: int) -> list[float]:
    if len(values) <= count:
        return list(values)
    return [values[round(step * (len(values) - 1) / (count - 1))] for step in range(count)]


def _text(x: float, y: float, text: str, rest: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {rest}>{escape(text)}</text>'
