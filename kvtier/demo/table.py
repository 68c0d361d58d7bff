"""The report for a person: a table of the turns, then every claim with its mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.demo.claims import Claim
from kvtier.demo.report import Answer, Report, Turn

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Style:
    """How marks look; plain where nobody watches or the encoding is poor."""

    yes: str = "ok"
    no: str = "NO"
    bar: str = "|"
    rule: str = "-"
    times: str = "x"
    dots: str = "..."
    bold: str = ""
    end: str = ""


def style_of(*, encoding: str, is_terminal: bool) -> Style:
    """Signs where the encoding has them, colours on a terminal."""
    if "utf" not in encoding.lower():
        return Style()
    yes, no = ("\x1b[32m✓\x1b[0m", "\x1b[31m✗\x1b[0m") if is_terminal else ("✓", "✗")
    bold, end = ("\x1b[1m", "\x1b[0m") if is_terminal else ("", "")
    return Style(yes=yes, no=no, bar="│", rule="─", times="×", dots="…", bold=bold, end=end)


def render(report: Report, claims: Sequence[Claim], style: Style = Style()) -> str:
    """The whole text, at most 100 columns wide."""
    return "\n".join([*_head(report, style), *_turns(report, style), *_claims(claims, style)])


def _head(report: Report, style: Style) -> list[str]:
    facts = report.environment
    title = (
        f"{style.bold}kvtier demo{style.end}: {report.model}, a handbook of "
        f"{report.document_token_count:,} tokens, {facts.get('cores', '?')} cores, "
        f"{report.seconds:.0f} s in all"
    )
    return ["", title, ""]


def _turns(report: Report, style: Style) -> list[str]:
    bar = f" {style.bar} "
    lines = [
        f"{'':6}with kvtier".ljust(62) + bar + "without kvtier",
        f"{'turn':>4}  {'engine':6} {'prompt':>6} {'cache':>6} {'kvtier':>6} {'computed':>8} "
        f"{'TTFT':>8} {'onboard':>10}" + bar + f"{'engine':6} {'computed':>8} {'TTFT':>8} "
        f"{'speed-up':>8}",
        style.rule * 63 + style.rule + style.rule * (WIDTH - 64),
    ]
    for index, turn in enumerate(report.turns):
        if index == report.restart_index:
            old, new = report.before_restart.with_kvtier.engine, turn.with_kvtier.engine
            lines.append(f"{'':6}engine {old} has exited; engine {new} is a new process")
        if index == report.warm.index:
            new = turn.with_kvtier.engine
            lines.append(
                f"{'':6}the daemon was killed, and started again with what was on NVMe; "
                f"engine {new} is a new process"
            )
        lines += _turn(index + 1, turn, style)
    lines.append("tokens; cache: the engine's own; onboard: copies from the daemon's memory")
    return [*lines, ""]


def _turn(number: int, turn: Turn, style: Style) -> list[str]:
    ours, other = turn.with_kvtier, turn.without
    speed_up = f"{1 / turn.ttft_ratio:.1f} {style.times}"
    row = (
        f"{number:>4}  {ours.engine:6} {ours.prompt_count:>6,} {ours.engine_cache_count:>6,} "
        f"{ours.kvtier_count:>6,} {ours.computed_count:>8,} {_ttft(ours):>8} "
        f"{_bandwidth(ours):>10} {style.bar} {other.engine:6} {other.computed_count:>8,} "
        f"{_ttft(other):>8} {style.bold}{speed_up:>8}{style.end}"
    )
    return [row, _line("asked", turn.question, style), _line("said", ours.text, style)]


def _claims(claims: Sequence[Claim], style: Style) -> list[str]:
    lines = []
    for claim in claims:
        mark = style.yes if claim.is_true else style.no
        lines += [f" {mark} {claim.text}", f"      {claim.figures}"]
    false_count = sum(not claim.is_true for claim in claims)
    if false_count:
        lines.append(f"{style.bold}{false_count} of {len(claims)} claims are FALSE{style.end}")
    else:
        lines.append(f"{style.bold}all {len(claims)} claims hold{style.end}")
    return lines


def _line(word: str, text: str, style: Style) -> str:
    flat = " ".join(text.split())
    head = f"{'':6}{word:>5}: "
    room = WIDTH - len(head)
    if len(flat) > room:
        flat = flat[: room - len(style.dots)].rstrip() + style.dots
    return head + flat


def _ttft(answer: Answer) -> str:
    return f"{answer.ttft_seconds:.2f} s"


def _bandwidth(answer: Answer) -> str:
    speed = answer.onboard_gb_per_second
    return "" if speed is None else f"{speed:.1f} GB/s"
