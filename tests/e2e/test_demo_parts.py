"""The demo's parts: a claim that is false is told, whatever is false about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.demo import __main__ as program
from kvtier.demo.claims import LOGIT_GAP_MAX, TTFT_RATIO_MAX, claims_of
from kvtier.demo.handbook import HANDBOOK, QUESTIONS
from kvtier.demo.play import Chat
from kvtier.demo.report import (
    Answer,
    ByteCheck,
    Kill,
    Parting,
    Report,
    TokenCheck,
    Turn,
    WarmStart,
    as_json,
)
from kvtier.demo.table import WIDTH, Style, render, style_of

Change = Callable[[Report], Report]
ANSWER_TOKENS = 40


def answer_of(engine: str, cache: int, kvtier: int, prompt: int, ttft: float) -> Answer:
    return Answer(
        engine=engine,
        engine_cache_count=cache,
        kvtier_count=kvtier,
        computed_count=prompt - cache - kvtier,
        prompt_count=prompt,
        ttft_seconds=ttft,
        seconds=ttft + 1.0,
        token_ids=tuple(range(ANSWER_TOKENS)),
        text="The ferry's name is Petrel.\n" + "She sails. " * 30,
        onboarded_bytes=kvtier * 46080,
        onboard_seconds=0.01 if kvtier else 0.0,
        connected=engine in ("A", "B"),
    )


def good_report() -> Report:
    """Every claim is true: prompts of 1,120, then 60 tokens more each time, answers of 40."""
    standing_count = (1240 + ANSWER_TOKENS - 1) // 16
    kvtier = (1180 + ANSWER_TOKENS - 1) // 16 * 16
    turns = (
        Turn("one?", answer_of("A", 0, 0, 1120, 3.0), answer_of("C", 0, 0, 1120, 2.9)),
        Turn("two?", answer_of("A", 1152, 0, 1180, 0.2), answer_of("C", 1152, 0, 1180, 0.2)),
        Turn("three?", answer_of("B", 0, kvtier, 1240, 0.3), answer_of("D", 0, 0, 1240, 3.1)),
        Turn(
            "four?",
            replace(answer_of("B", 1248, 0, 1300, 0.2), connected=False),
            answer_of("C", 1248, 0, 1300, 0.2),
        ),
        Turn(
            "five?",
            replace(
                answer_of("E", 0, 16 * (standing_count + 2), 1360, 0.6),
                tier_blocks={"nvme": standing_count + 2},
            ),
            answer_of("F", 0, 0, 1360, 3.2),
        ),
    )
    return Report(
        document_token_count=1100,
        block_tokens=16,
        turns=turns,
        restart_index=2,
        kill_index=3,
        tokens=TokenCheck(answer_of("C", kvtier, 0, 1240, 0.2), None),
        bytes=ByteCheck(onboarded_count=kvtier // 16, equal_count=kvtier // 16),
        kill=Kill(16, 40, connected_before=True, longest_pause_seconds=0.1),
        warm=WarmStart(4, standing_count, ByteCheck(standing_count, standing_count), None, 0.4),
        daemon_start_seconds=0.5,
        seconds=60.0,
        model="a model",
        environment={"cores": 2},
    )


def with_answer(index: int, *, without: bool = False, **changes: object) -> Change:
    def change(report: Report) -> Report:
        turns = list(report.turns)
        name = "without" if without else "with_kvtier"
        answer = replace(getattr(turns[index], name), **changes)  # type: ignore[arg-type]
        turns[index] = replace(turns[index], **{name: answer})  # type: ignore[arg-type]
        return replace(report, turns=tuple(turns))

    return change


def with_kill(**changes: object) -> Change:
    return lambda report: replace(report, kill=replace(report.kill, **changes))  # type: ignore[arg-type]


def with_warm(**changes: object) -> Change:
    return lambda report: replace(report, warm=replace(report.warm, **changes))  # type: ignore[arg-type]


def with_cold_answer(token_ids: tuple[int, ...], gap: float) -> Change:
    def change(report: Report) -> Report:
        parted = replace(report.tokens, parting_from_cold=Parting(5, gap))
        return with_answer(2, without=True, token_ids=token_ids)(replace(report, tokens=parted))

    return change


def false_claims(report: Report) -> list[str]:
    return [claim.text for claim in claims_of(report) if not claim.is_true]


OTHER_TOKENS = (*range(5), 99, *range(6, ANSWER_TOKENS))
LOST_BLOCK = {"kvtier_count": 1200, "computed_count": 40}


def test_every_claim_of_a_good_report_holds() -> None:
    assert false_claims(good_report()) == []


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("document", lambda report: replace(report, document_token_count=999)),
        ("add up", with_answer(0, computed_count=1)),
        ("add up", with_answer(1, without=True, kvtier_count=16, computed_count=28)),
        ("every full block", with_answer(2, **LOST_BLOCK)),
        ("every full block", with_answer(2, engine_cache_count=16, computed_count=8)),
        # One block fewer than the answers of A had filled.
        ("every full block", with_answer(1, token_ids=tuple(range(15)))),
        ("time to first token", with_answer(2, ttft_seconds=3.1 * TTFT_RATIO_MAX + 0.01)),
        ("time to first token", with_answer(2, without=True, engine_cache_count=1000,
                                            computed_count=240)),
        ("in its own cache", with_answer(2, token_ids=OTHER_TOKENS)),
        ("in its own cache", lambda report: replace(report, tokens=replace(
            report.tokens, local_hit=replace(report.tokens.local_hit, engine_cache_count=1200,
                                             computed_count=40)))),
        ("cold prefill", with_answer(2, without=True, token_ids=OTHER_TOKENS)),
        ("cold prefill", with_cold_answer(OTHER_TOKENS, LOGIT_GAP_MAX)),
        ("bytes", lambda report: replace(report, bytes=ByteCheck(76, 75))),
        ("bytes", lambda report: replace(report, bytes=ByteCheck(0, 0))),
        ("middle of an answer", with_kill(after_token_count=39)),
        ("middle of an answer", with_kill(connected_before=False)),
        ("middle of an answer", with_answer(3, connected=True)),
        ("answer came", with_answer(3, token_ids=OTHER_TOKENS)),
        # One block less than had stood on NVMe; one that was in memory; one more than came.
        ("stood on NVMe", with_answer(4, kvtier_count=16 * 78, computed_count=1360 - 16 * 78,
                                      tier_blocks={"nvme": 78})),
        ("stood on NVMe", with_answer(4, tier_blocks={"nvme": 80, "dram": 1})),
        ("stood on NVMe", with_answer(4, tier_blocks={"nvme": 82})),
        ("stood on NVMe", with_warm(standing_count=0)),
        ("first token is at most 0.5", with_answer(4, ttft_seconds=1.61)),
        ("first token is at most 0.5", with_answer(4, without=True, engine_cache_count=1280,
                                                   computed_count=80)),
        ("offloaded before the kill", with_warm(bytes=ByteCheck(79, 78))),
        ("offloaded before the kill", with_warm(bytes=ByteCheck(78, 78))),
        ("tokens of a cold prefill", with_answer(4, token_ids=OTHER_TOKENS)),
        ("tokens of a cold prefill", with_warm(parting_from_cold=Parting(5, LOGIT_GAP_MAX))),
    ],
)  # fmt: skip
def test_false_number_makes_its_claim_false(word: str, change: Change) -> None:
    found = false_claims(change(good_report()))
    assert any(word in text for text in found), found


def test_near_tie_is_no_difference_from_a_cold_prefill() -> None:
    report = with_cold_answer(OTHER_TOKENS, LOGIT_GAP_MAX / 2)(good_report())
    assert false_claims(report) == []


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_table_is_plain_and_fits_where_nobody_watches(encoding: str) -> None:
    report = good_report()
    text = render(report, claims_of(report), style_of(encoding=encoding, is_terminal=False))
    assert text.encode(encoding)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH


def test_table_shows_where_the_prompt_came_from_and_what_it_saved() -> None:
    report = good_report()
    rows = render(report, claims_of(report)).splitlines()
    third = next(row for row in rows if row.startswith("   3"))
    words = third.replace("|", " ").split()
    assert words[:5] == ["3", "B", "1,240", "0", "1,216"]
    assert words[6:10] == ["0.30", "s", "5.6", "GB/s"]
    assert words[-2:] == ["10.3", "x"]
    assert "all 13 claims hold" in rows[-1]


def test_table_marks_a_false_claim() -> None:
    report = replace(good_report(), document_token_count=10)
    text = render(report, claims_of(report), Style())
    assert " NO the document has" in text
    assert "1 of 13 claims are FALSE" in text


def test_report_is_json_with_the_derived_figures() -> None:
    facts = json.loads(json.dumps(as_json(good_report())))
    assert facts["restart_ttft_ratio"] == pytest.approx(0.3 / 3.1)
    assert facts["warm_ttft_ratio"] == pytest.approx(0.6 / 3.2)
    assert facts["turns"][2]["with_kvtier"]["kvtier_count"] == 1216


def test_next_turn_begins_exactly_where_the_answer_ended() -> None:
    chat = Chat()
    assert chat.next_text("Who?").startswith("<|im_start|>system\nOperations handbook")
    ended, cut_off = Chat([1, 2], is_ended=True), Chat([1, 2], is_ended=False)
    rest = "\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    assert ended.next_text("Who?") == rest
    assert cut_off.next_text("Who?") == "<|im_end|>" + rest


def test_handbook_answers_the_questions_it_is_asked() -> None:
    assert len(HANDBOOK.split()) > 800
    assert len(QUESTIONS) == 5
    assert "brass key" in QUESTIONS[4]
    assert "carries the brass key" in " ".join(HANDBOOK.split())
    assert "station manager is Ingrid Vale" in " ".join(HANDBOOK.split())


def test_missing_weights_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MODEL_PACKAGE", "no-such-package")
    missing = program.what_is_missing()
    assert "make setup" in missing
    assert "\n" not in missing


@pytest.mark.parametrize(("token_count", "exit_code"), [(1100, 0), (10, 1)])
def test_exit_code_says_whether_all_claims_are_true(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    token_count: int,
    exit_code: int,
) -> None:
    report = replace(good_report(), document_token_count=token_count)
    monkeypatch.setattr(program, "perform", lambda say: report)
    monkeypatch.setattr(program, "what_is_missing", lambda: "")
    monkeypatch.setattr(sys, "argv", ["demo", "--report", str(tmp_path / "report.json")])
    assert program.main() == exit_code
    printed = capsys.readouterr()
    assert ("not true: the document" in printed.err) == bool(exit_code)
    written = json.loads((tmp_path / "report.json").read_text())
    assert [one["true"] for one in written["claims"]].count(False) == exit_code


@pytest.mark.slow
def test_demo_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    """From another folder, with ctrl-C while the engines load."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvtier.demo"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stderr is not None
    for line in demo.stderr:
        if "load the model" in line:
            break
    children = [
        int(pid) for pid in Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    ]
    demo.send_signal(2)
    _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert "nothing is left behind" in errors
    assert children
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "demo-report.json").exists()
