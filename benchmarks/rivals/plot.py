"""Bars of the medians as SVG; plain text, so that the same figures give the same file."""

from __future__ import annotations

from benchmarks.rivals.report import ROWS, TITLES, Figures, Row

_COLOURS = {
    "kvtier": "#1f6f8b",
    "lmcache": "#c8763a",
    "mooncake": "#6b7f3f",
    "mooncake-embedded": "#a9b88a",
}
_PANELS = ROWS[:8]
_COLUMNS, _WIDTH, _BAR, _LABEL, _GAP = 2, 430, 15, 150, 26


def draw(result: Figures) -> str:
    systems: Figures = result["systems"]
    height = _GAP + _BAR * len(systems) + 14
    rows = -(-len(_PANELS) // _COLUMNS)
    parts = []
    for number, row in enumerate(_PANELS):
        x, y = number % _COLUMNS * _WIDTH, number // _COLUMNS * height
        parts += _panel(row, result, x + 10, y)
    total = (_COLUMNS * _WIDTH + 20, rows * height + 10)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total[0]} {total[1]}" '
        f'width="{total[0]}" height="{total[1]}" font-family="sans-serif" font-size="11">'
    )
    ground = f'<rect width="{total[0]}" height="{total[1]}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def _panel(row: Row, result: Figures, x: int, y: int) -> list[str]:
    """One figure, all systems, from 0 on: the longest bar fills the width."""
    systems: Figures = result["systems"]
    values = {name: figures.get(row.name) for name, figures in systems.items()}
    longest = max((value for value in values.values() if value), default=1.0)
    title = row.text.format(tokens=result["sizes"]["tokens"])
    parts = [f'<text x="{x}" y="{y + 18}" font-weight="bold">{title}, {row.unit}</text>']
    for number, (name, value) in enumerate(values.items()):
        top = y + _GAP + number * _BAR
        parts.append(f'<text x="{x}" y="{top + 11}" fill="#444444">{TITLES[name]}</text>')
        if value is None:
            parts.append(f'<text x="{x + _LABEL}" y="{top + 11}" fill="#888888">–</text>')
            continue
        length = (_WIDTH - _LABEL - 70) * value / longest
        colour = _COLOURS[name]
        parts.append(
            f'<rect x="{x + _LABEL}" y="{top + 2}" width="{length:.1f}" height="{_BAR - 4}" '
            f'fill="{colour}"/>'
        )
        parts.append(
            f'<text x="{x + _LABEL + length + 4:.1f}" y="{top + 11}">{value:.{row.digits}f}</text>'
        )
    return parts
