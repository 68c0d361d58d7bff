"""The report of `kvtier selftest vllm`: for people, and the same as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from kvtier.cli.environment import describe
from kvtier.cli.selftest_engine import Answer
from kvtier.cli.selftest_judge import Limits, Seen, Verdict, all_hold, overhead, warm_ratio
from kvtier.cli.selftest_play import PlayOptions


@dataclass(frozen=True)
class Report:
    """`arguments` are those of vLLM's command line."""

    options: PlayOptions
    limits: Limits
    seen: Seen
    verdicts: Sequence[Verdict]
    arguments: Sequence[str]

    @property
    def holds(self) -> bool:
        return all_hold(self.verdicts)

    def facts(self) -> dict[str, object]:
        """JSON values only."""
        return {
            "holds": self.holds,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "figures": self.figures(),
            "engine": self.seen.facts,
            "arguments": list(self.arguments),
            "options": asdict(self.options),
            "limits": asdict(self.limits),
            "counts": self.seen.counts,
            "environment": describe(),
        }

    def figures(self) -> dict[str, object]:
        seen = self.seen
        warm = [answer for answers in seen.warm for answer in answers]
        return {
            "prompt_tokens": seen.prompt_tokens,
            "block_tokens": seen.block_tokens,
            "hit_tokens": [answer.hit_tokens for answer in warm],
            "ttft_cold_s": _first(seen.cold),
            "ttft_own_hit_s": _first(seen.local),
            "ttft_warm_s": _first(warm),
            "warm_ratio": warm_ratio(seen),
            "load_seconds_without": [without for without, _ in seen.loads],
            "load_seconds_with": [with_ for _, with_ in seen.loads],
            "overhead": overhead(seen),
            "daemon_killed_answer_s": seen.killed.during_seconds if seen.killed else None,
        }

    def markdown(self) -> str:
        parts = [
            "# kvtier self-test with vLLM",
            "**Every check holds.**" if self.holds else "**Some checks do not hold.**",
            _table(
                ("", "check", "what was seen"),
                [(v.mark, v.claim, v.detail.replace("\n", "<br>")) for v in self.verdicts],
            ),
            "## Figures",
            _table(("figure", "value"), [(k, _text(v)) for k, v in self.figures().items()]),
            self._how(),
            "## What was run",
            _table(("", ""), [(k, _text(v)) for k, v in (self.seen.facts | describe()).items()]),
            f"vLLM's arguments: `{shlex.join(self.arguments)}`; seed {self.options.seed}.",
            "## Counts of the last engine",
            _table(("metric", "count"), [(k, f"{v:g}") for k, v in self.seen.counts.items()]),
        ]
        return "\n\n".join(parts) + "\n"

    def _how(self) -> str:
        options = self.options
        return (
            f"`ttft_*_s` are medians. A load is {options.request_count} prompts of"
            f" {options.load_tokens} tokens at once, {options.output_tokens} tokens each to answer;"
            " every round's engines get the same ones, and nobody has seen them before."
        )


def _first(answers: Sequence[Answer]) -> float | None:
    return median(answer.first_seconds for answer in answers) if answers else None


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_text(one) for one in value) or "-"
    return "-" if value is None or value == "" else str(value)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
