"""The studies of paging as SVG; plain text, so that the same figures give the same file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
WASTE_PLOT, SIZES_PLOT = DOCS / "paging-waste.svg", DOCS / "paging-block-sizes.svg"
_PARTS = {
    "used": "#1f6f8b",
    "reserved": "#a9b88a",
    "internal": "#c8763a",
    "external": "#8a3a2a",
}
_WIDTH, _LABEL, _BAR = 760, 170, 20
_LINES = {"swap": "#1f6f8b", "recompute": "#c8763a"}
_PLOT_HEIGHT, _LEFT, _RIGHT = 200, 60, 640

Result = dict[str, Any]


def write(result: Result) -> None:
    WASTE_PLOT.write_text(draw_waste(result["waste"]), encoding="utf-8")
    SIZES_PLOT.write_text(draw_sizes(result["block_sizes"]), encoding="utf-8")


def draw_waste(waste: Result) -> str:
    """Where the memory's tokens are, a bar for each allocator."""
    parts, y = _legend(_PARTS, 4), 34
    for lengths, allocators in waste.items():
        parts.append(_text(10, y + 12, f"{lengths} lengths", weight="bold"))
        y += _BAR
        for name, figures in allocators.items():
            parts.append(_text(10, y + 13, name))
            x = float(_LABEL)
            for part, colour in _PARTS.items():
                length = (_WIDTH - _LABEL - 80) * figures[part]
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="{_BAR - 6}" '
                    f'fill="{colour}"/>'
                )
                x += length
            wasted = f"{100 * figures['wasted_share']:.1f} % wasted"
            parts.append(_text(_WIDTH - 78, y + 13, wasted))
            y += _BAR
        y += 10
    return _svg(_WIDTH, y, parts)


def draw_sizes(sizes: Result) -> str:
    """Tokens a second over the tokens of a block."""
    parts = _legend(_LINES, 4)
    best = max(ways[mode]["tokens_per_second"] for ways in sizes.values() for mode in _LINES)
    bottom = 34 + _PLOT_HEIGHT
    step = (_RIGHT - _LEFT) / (len(sizes) - 1)
    for number, size in enumerate(sizes):
        parts.append(_text(_LEFT + step * number - 6, bottom + 16, size))
    for share in (0.0, 0.5, 1.0):
        y = bottom - _PLOT_HEIGHT * share
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(10, y + 4, f"{best * share:,.0f}"))
    for mode, colour in _LINES.items():
        points = [
            (
                _LEFT + step * number,
                bottom - _PLOT_HEIGHT * ways[mode]["tokens_per_second"] / best,
            )
            for number, ways in enumerate(sizes.values())
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts.append(_text(_LEFT, bottom + 34, "tokens a second (virtual) over tokens a block"))
    return _svg(_WIDTH, bottom + 44, parts)


def _legend(colours: dict[str, str], y: int) -> list[str]:
    parts = []
    for number, (name, colour) in enumerate(colours.items()):
        x = _LEFT + 120 * number
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(x + 18, y + 10, name))
    return parts


def _text(x: float, y: float, text: str, *, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}">{text}</text>'


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
    )
    ground = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])
