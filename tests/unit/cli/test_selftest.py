"""`kvtier selftest`: what it does with an engine, and how it judges what it saw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.cli.selftest_engine import Answer, reason_in
from kvtier.cli.selftest_judge import Limits, Seen, Verdict, all_hold, first_difference, judge
from kvtier.cli.selftest_play import Play, PlayOptions
from kvtier.cli.selftest_report import Report
from kvtier.errors import ConfigError
from tests.support.clock import ManualClock
from tests.support.fake_trial import FakeEngines, Faults, Held

LIMITS = Limits(warm_ratio_max=0.5, overhead_max=0.1)
OPTIONS = PlayOptions(
    tokens=256, prompt_count=3, output_tokens=4, rounds=2, request_count=2, seed=1
)
ALL = {"hits", "tokens", "tokens_cold", "warm", "overhead", "restart"}


def played(
    faults: Faults | None = None, *, is_ours: bool = True, options: PlayOptions = OPTIONS
) -> tuple[Seen, Held, FakeEngines]:
    held, clock = Held(), ManualClock()
    engines = FakeEngines(held, faults or Faults())
    play = Play(options, engines, held if is_ours else None, clock=clock, sleep=clock.advance)
    return play.run(), held, engines


def failing(seen: Seen) -> set[str]:
    return {verdict.name for verdict in judge(seen, LIMITS) if verdict.holds is False}


def test_all_checks_hold_for_an_engine_that_is_right() -> None:
    seen, held, engines = played()
    assert {v.name for v in judge(seen, LIMITS) if v.holds} == ALL
    assert engines.started == [False, True, False, True, True]
    assert held.was_killed
    assert len(seen.warm) == 2


def test_a_daemon_of_somebody_else_is_not_killed() -> None:
    seen, held, _ = played(is_ours=False)
    verdicts = judge(seen, LIMITS)
    assert {v.name for v in verdicts if v.holds is None} == {"restart"}
    assert not held.was_killed
    assert all_hold(verdicts)


@pytest.mark.parametrize(
    ("faults", "names"),
    [
        (Faults(wrong_after_hit=True), {"tokens", "tokens_cold"}),
        # A tie explains a difference from a cold prefill, and none from vLLM's own hit.
        (Faults(wrong_after_hit=True, gap=0.001), {"tokens"}),
        # Then it is vLLM's rounding, and not kvtier.
        (Faults(own_hit_differs=True), set()),
        (Faults(forgets=True), {"hits", "tokens", "warm"}),
        (Faults(slow_hits=True), {"warm"}),
        (Faults(slow_misses=True), {"overhead"}),
        (Faults(deaf=True), {"engine"}),
        (Faults(dies=True), {"engine"}),
        (Faults(dies_with_daemon=True), {"engine", "restart"}),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value)[7:40],
)
def test_what_is_wrong_is_named(faults: Faults, names: set[str]) -> None:
    seen, _, _ = played(faults)
    assert failing(seen) == names
    assert all_hold(judge(seen, LIMITS)) is (not names)


def test_hits_that_kvtier_did_not_count_are_not_its_own() -> None:
    seen, _, _ = played()
    seen.onboarded_blocks[0] -= 1
    assert failing(seen) == {"hits"}


def test_missed_prompts_are_told_with_the_reason_and_what_to_do() -> None:
    seen, _, _ = played(Faults(forgets=True))
    [hits] = [verdict for verdict in judge(seen, LIMITS) if verdict.name == "hits"]
    assert "6 of 6 prompts had less, the least 0 of 224 tokens" in hits.detail
    assert "6 missed, absent: has the daemon memory enough" in hits.detail


def test_an_answer_that_the_kill_held_up_fails() -> None:
    seen, _, _ = played()
    assert seen.killed is not None
    seen.killed.during_seconds += 6
    assert failing(seen) == {"restart"}


def test_prompts_end_within_a_block_and_none_is_asked_twice() -> None:
    assert OPTIONS.prompt_tokens % 16 != 0
    assert OPTIONS.prompt_tokens <= OPTIONS.tokens
    seen, _, _ = played()
    assert all(answer.hit_tokens == 0 for answer in seen.cold + seen.filled)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"tokens": 5000}, "do not fit into"), ({"tokens": 32}, "no prompt would fill")],
)
def test_too_many_or_too_few_tokens_are_the_users_mistake(
    change: dict[str, Any], words: str
) -> None:
    sizes = {"prompt_count": 1, "output_tokens": 4, "rounds": 1, "request_count": 1, "seed": 1}
    with pytest.raises(ConfigError, match=words):
        played(options=PlayOptions(**(sizes | change)))


def answer(*tokens: int) -> Answer:
    return Answer(tokens, (), 0, 0.0)


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((), (1,), 0)],
)
def test_first_difference(one: Sequence[int], other: Sequence[int], place: int | None) -> None:
    assert first_difference(answer(*one), answer(*other)) == place


def test_nothing_checked_is_no_success() -> None:
    assert not all_hold([])
    assert not all_hold([Verdict("x", "", None, "")])


def test_report_tells_verdicts_figures_and_the_command() -> None:
    seen, _, _ = played(Faults(slow_hits=True))
    report = Report(OPTIONS, LIMITS, seen, judge(seen, LIMITS), ("--model", "a b"))
    text = report.markdown()
    assert not report.holds
    assert "Some checks do not hold" in text
    for verdict in report.verdicts:
        assert f"| {verdict.mark} | {verdict.claim} |" in text
    assert "--model 'a b'" in text
    assert "| warm_ratio | 1 |" in text
    facts = json.loads(json.dumps(report.facts()))
    assert facts["holds"] is False
    assert facts["figures"]["hit_tokens"] == [224] * 6


def test_our_own_refusal_is_found_in_vllms_log() -> None:
    log = (
        "INFO a\nkvtier.x.Unsupported: kvtier: KV on cuda is not supported yet\nError: engine\nend"
    )
    assert (
        reason_in(log).strip() == "| kvtier.x.Unsupported: kvtier: KV on cuda is not supported yet"
    )
    assert reason_in("one\n\ntwo\n") == "  | one\n  | two"


def test_the_first_error_in_a_log_is_told_beside_its_end() -> None:
    log = "\n".join(["ValueError: root", *(f"line {n}" for n in range(50)), "RuntimeError: late"])
    lines = reason_in(log).splitlines()
    assert lines[0] == "  | ValueError: root"
    assert lines[-1] == "  | RuntimeError: late"
    assert len(lines) == 7
