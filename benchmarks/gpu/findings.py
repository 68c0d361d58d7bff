"""What a stage has found, written down as it goes: a stage that is killed leaves what it had."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.verified import write_json


class Findings:
    """Figures, what was wrong, and which targets were missed."""

    def __init__(self, place: Path | None = None) -> None:
        self._place = place
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []  # Claims of correctness that do not hold.
        self.missed: list[str] = []  # Targets of speed.
        self.is_cut_short = False
        self.error: str | None = None  # What ended the stage.

    def note(self, name: str, value: Any) -> None:
        self.figures[name] = value
        self._say(f"{name}: {value}")

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """One row of a table."""
        self.figures.setdefault(name, []).append(dict(row))
        self._say(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))

    def claim(self, text: str, is_right: bool) -> None:
        if not is_right:
            self.wrong.append(text)
        self._say(f"{'right' if is_right else 'WRONG'}: {text}")

    def target(self, text: str, value: float, *, least: float = 0.0, most: float = 1e30) -> None:
        """Of speed; the value belongs to the text, and stands in the figures elsewhere or here."""
        is_met = least <= value <= most
        if not is_met:
            self.missed.append(f"{text}: {value:.3g}")
        self.figures.setdefault("targets", {})[text] = round(value, 4)
        self._say(f"{'met' if is_met else 'MISSED'}: {text}: {value:.3g}")

    def cut_short(self, what: str) -> None:
        """The time was up: what is named was not measured."""
        self.is_cut_short = True
        self.figures.setdefault("not_measured", []).append(what)
        self._say(f"no time left for: {what}")

    def as_json(self) -> dict[str, Any]:
        return {
            "figures": self.figures,
            "wrong": self.wrong,
            "missed": self.missed,
            "is_cut_short": self.is_cut_short,
            "error": self.error,
        }

    def save(self) -> None:
        if self._place is not None:
            write_json(self._place, self.as_json())

    def _say(self, line: str) -> None:
        if self._place is not None:
            sys.stdout.write(f"    {line}\n")
            sys.stdout.flush()
            self.save()


def gigabytes_per_second(bytes_count: int, seconds: float) -> float:
    return round(bytes_count / max(seconds, 1e-12) / 1e9, 2)
