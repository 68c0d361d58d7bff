"""What the demo says, each sentence held against the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtier.demo.report import Parting, Report, Turn

DOCUMENT_TOKENS_MIN = 1000
TTFT_RATIO_MAX = 0.25
# Every block is read from a disk, whatever that may be.
WARM_TTFT_RATIO_MAX = 0.5
# Below it two tokens are a tie: the order of float additions decides, and a cached prefix is
# computed in other batches than a cold prompt.
LOGIT_GAP_MAX = 1e-2
# Tokens before and after the kill, for it to be in the middle of the answer.
KILL_TOKENS_MIN = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence, whether it is true, and the figures that say so."""

    text: str
    is_true: bool
    figures: str


def claims_of(report: Report) -> list[Claim]:
    """Every claim, true or not, in the order of the story."""
    return [judge(report) for judge in _JUDGES]


def _document(report: Report) -> Claim:
    return Claim(
        f"the document has at least {DOCUMENT_TOKENS_MIN:,} tokens",
        report.document_token_count >= DOCUMENT_TOKENS_MIN,
        f"{report.document_token_count:,} tokens",
    )


def _counts(report: Report) -> Claim:
    answers = [answer for turn in report.turns for answer in (turn.with_kvtier, turn.without)]
    wrong = [
        answer
        for answer in [*answers, report.tokens.local_hit]
        if answer.engine_cache_count + answer.kvtier_count + answer.computed_count
        != answer.prompt_count
    ]
    by_kvtier = [turn.without.kvtier_count for turn in report.turns]
    return Claim(
        "engine cache, kvtier and computed add up to each prompt; the comparison has no kvtier",
        not wrong and not any(by_kvtier),
        f"{len(answers) + 1 - len(wrong)} of {len(answers) + 1} answers",
    )


def _onboarded(report: Report) -> Claim:
    """All full blocks of A: of its last answer every token but the last has its KV computed."""
    before, after = report.before_restart.with_kvtier, report.restart.with_kvtier
    chain_count = before.prompt_count + len(before.token_ids) - 1
    full_count = chain_count // report.block_tokens * report.block_tokens
    has_decoded = full_count - before.prompt_count >= report.block_tokens
    return Claim(
        "the new process gets every full block of the old one, those of its answers as well",
        after.kvtier_count == full_count and after.engine_cache_count == 0 and has_decoded,
        f"{after.kvtier_count:,} of {full_count:,} tokens, "
        f"{full_count - before.prompt_count:,} of them answered",
    )


def _ratio(report: Report) -> Claim:
    with_kvtier, without = report.restart.with_kvtier, report.restart.without
    return Claim(
        f"its time to first token is at most {TTFT_RATIO_MAX} of that without kvtier",
        0.0 < report.restart.ttft_ratio <= TTFT_RATIO_MAX
        and without.computed_count == without.prompt_count == with_kvtier.prompt_count,
        f"{with_kvtier.ttft_seconds:.2f} s / {without.ttft_seconds:.2f} s = "
        f"{report.restart.ttft_ratio:.3f}",
    )


def _local_hit(report: Report) -> Claim:
    hit, local = report.restart.with_kvtier, report.tokens.local_hit
    same_length = hit.kvtier_count == local.engine_cache_count > 0 and local.kvtier_count == 0
    return Claim(
        "its tokens are those of an engine that has the same prefix in its own cache",
        same_length and hit.token_ids == local.token_ids and len(hit.token_ids) > 0,
        f"{_equal_count(hit.token_ids, local.token_ids)} of {len(local.token_ids)} tokens, "
        f"prefixes {hit.kvtier_count:,} and {local.engine_cache_count:,}",
    )


def _cold(report: Report) -> Claim:
    text = "and those of a cold prefill, but for ties"
    return _as_cold(text, report.restart, report.tokens.parting_from_cold)


def _as_cold(text: str, turn: Turn, parting: Parting | None) -> Claim:
    hit, cold = turn.with_kvtier.token_ids, turn.without.token_ids
    if parting is None:
        return Claim(text, hit == cold, f"{_equal_count(hit, cold)} of {len(cold)} tokens")
    is_tie = parting.logit_gap < LOGIT_GAP_MAX
    return Claim(
        text,
        is_tie and _equal_count(hit, cold) == parting.index,
        f"they part at token {parting.index}, logits {parting.logit_gap:.1e} apart",
    )


def _bytes(report: Report) -> Claim:
    check = report.bytes
    expected = report.restart.with_kvtier.kvtier_count // report.block_tokens
    return Claim(
        "the bytes onboarded are those offloaded: xxh3-64 of each device block on both sides",
        check.equal_count == check.onboarded_count == expected > 0,
        f"{check.equal_count} of {expected} blocks equal",
    )


def _kill(report: Report) -> Claim:
    kill, last = report.kill, report.killed.with_kvtier
    after_count = kill.token_count - kill.after_token_count
    return Claim(
        "the daemon was killed in the middle of an answer",
        kill.after_token_count >= KILL_TOKENS_MIN
        and after_count >= KILL_TOKENS_MIN
        and kill.connected_before
        and not last.connected,
        f"after token {kill.after_token_count} of {kill.token_count}",
    )


def _answer_came(report: Report) -> Claim:
    with_kvtier, without = report.killed.with_kvtier, report.killed.without
    return Claim(
        "and the answer came all the same, equal to the one without kvtier",
        with_kvtier.token_ids == without.token_ids and len(with_kvtier.token_ids) > 0,
        f"{_equal_count(with_kvtier.token_ids, without.token_ids)} of "
        f"{len(without.token_ids)} tokens, longest pause "
        f"{report.kill.longest_pause_seconds:.2f} s",
    )


def _warm_source(report: Report) -> Claim:
    hit, standing_count = report.warm_turn.with_kvtier, report.warm.standing_count
    got_count = hit.kvtier_count // report.block_tokens
    return Claim(
        "started again, the daemon gives a new engine what stood on NVMe, all of it from there",
        dict(hit.tier_blocks) == {"nvme": got_count} and got_count >= standing_count > 0,
        f"{hit.tier_blocks.get('nvme', 0)} blocks from nvme, {hit.tier_blocks.get('dram', 0)} "
        f"from dram; {standing_count} had stood there, ready after "
        f"{report.warm.start_seconds:.2f} s",
    )


def _warm_ratio(report: Report) -> Claim:
    with_kvtier, without = report.warm_turn.with_kvtier, report.warm_turn.without
    return Claim(
        f"and its time to first token is at most {WARM_TTFT_RATIO_MAX} of that without kvtier",
        0.0 < report.warm_turn.ttft_ratio <= WARM_TTFT_RATIO_MAX
        and without.computed_count == without.prompt_count == with_kvtier.prompt_count,
        f"{with_kvtier.ttft_seconds:.2f} s / {without.ttft_seconds:.2f} s = "
        f"{report.warm_turn.ttft_ratio:.3f}",
    )


def _warm_bytes(report: Report) -> Claim:
    check, standing_count = report.warm.bytes, report.warm.standing_count
    return Claim(
        "with the bytes that were offloaded before the kill",
        check.equal_count == check.onboarded_count == standing_count > 0,
        f"{check.equal_count} of {standing_count} blocks equal",
    )


def _warm_tokens(report: Report) -> Claim:
    text = "and the tokens of a cold prefill, but for ties"
    return _as_cold(text, report.warm_turn, report.warm.parting_from_cold)


def _equal_count(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


_JUDGES: tuple[Callable[[Report], Claim], ...] = (
    _document,
    _counts,
    _onboarded,
    _ratio,
    _local_hit,
    _cold,
    _bytes,
    _kill,
    _answer_came,
    _warm_source,
    _warm_ratio,
    _warm_bytes,
    _warm_tokens,
)
