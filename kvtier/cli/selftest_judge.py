"""Whether what was seen of an engine with kvtier and without is as it must be. Pure.

Right tokens are those that the engine itself says when it has the same prefix in its own cache:
whatever kvtier loads must be the same KV. A cold prefill computes in other parts and so rounds
otherwise; there a token may differ where the two likeliest are nearly tied, or where the engine's
own hit differs from its own cold prefill as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kvtier.cli.selftest_engine import Answer

TIE_LOGPROBS = 1e-2
# What an answer may take beyond the cold one's time while the daemon is being killed: the longest
# waits of the connector, and a machine that starts processes meanwhile.
KILL_SLACK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Limits:
    warm_ratio_max: float
    overhead_max: float


@dataclass(slots=True)
class Killed:
    """One answer that a daemon was killed under, and what came after it was started again."""

    cold: Answer
    cold_seconds: float
    was_killed: bool = False
    during: Answer | None = None
    during_seconds: float = 0.0
    is_offloading_again: bool = False


@dataclass(slots=True)
class Seen:
    """All that a self-test saw; one answer a prompt in each list, in the same order."""

    block_tokens: int = 0
    prompt_tokens: int = 0
    cold: list[Answer] = field(default_factory=list)
    local: list[Answer] = field(default_factory=list)  # The engine's own hits.
    filled: list[Answer] = field(default_factory=list)  # With kvtier, nothing there yet.
    warm: list[list[Answer]] = field(default_factory=list)  # By engine: hits from kvtier.
    onboarded_blocks: list[float] = field(default_factory=list)  # By engine, as it told itself.
    missed: dict[str, int] = field(default_factory=dict)  # Warm prompts without a hit, by reason.
    loads: list[tuple[list[float], list[float]]] = field(default_factory=list)  # Without, with.
    killed: Killed | None = None  # None: the daemon was not ours to kill.
    failure: str = ""  # Why the play ended early.
    facts: dict[str, object] = field(default_factory=dict)  # Of the engine.
    counts: dict[str, float] = field(default_factory=dict)  # Of the last engine.

    @property
    def full_tokens(self) -> int:
        """The most that a hit can be: all full blocks."""
        return self.prompt_tokens // self.block_tokens * self.block_tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """`holds` is None where the check was not made."""

    name: str
    claim: str
    holds: bool | None
    detail: str

    @property
    def mark(self) -> str:
        return {True: "✓", False: "✗", None: "–"}[self.holds]


def judge(seen: Seen, limits: Limits) -> list[Verdict]:
    verdicts = []
    if seen.failure:
        verdicts.append(Verdict("engine", "vLLM serves until it is ended", False, seen.failure))
    checks = (_hits, _same_as_own_hits, _same_as_cold)
    verdicts += [check(seen) for check in checks]
    verdicts += [_warm(seen, limits.warm_ratio_max), _overhead(seen, limits.overhead_max)]
    verdicts.append(_survives(seen))
    return verdicts


def first_difference(one: Answer, other: Answer) -> int | None:
    """The first place where their tokens differ; None: they are the same."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    for place, (wanted, found) in enumerate(pairs):
        if wanted != found:
            return place
    shorter = min(len(one.tokens), len(other.tokens))
    return None if len(one.tokens) == len(other.tokens) else shorter


def tie_gap(answer: Answer, place: int) -> float:
    """How much likelier the first token was than the second."""
    likely = answer.likely[place] if place < len(answer.likely) else ()
    return likely[0][1] - likely[1][1] if len(likely) > 1 else float("inf")


def warm_ratio(seen: Seen) -> float | None:
    warm = [answer.first_seconds for answers in seen.warm for answer in answers]
    cold = [answer.first_seconds for answer in seen.cold]
    return median(warm) / median(cold) if warm and cold else None


def overhead(seen: Seen) -> float | None:
    """How much longer a load of misses takes with kvtier; the median over the rounds."""
    ratios = [median(with_) / median(without) for without, with_ in seen.loads]
    return median(ratios) - 1 if ratios else None


def _hits(seen: Seen) -> Verdict:
    claim = "a new engine gets every full block of its prompts from kvtier"
    if not seen.warm:
        return Verdict("hits", claim, None, "it did not come so far")
    wanted = seen.full_tokens
    short = [a for answers in seen.warm for a in answers if a.hit_tokens < wanted]
    total = sum(len(answers) for answers in seen.warm)
    told = min(seen.onboarded_blocks, default=0.0)
    blocks = wanted // seen.block_tokens * len(seen.cold)
    if short:
        least = min(answer.hit_tokens for answer in short)
        detail = f"{len(short)} of {total} prompts had less, the least {least} of {wanted} tokens"
        hints = [f"; {n} missed, {reason}: {_hint(reason)}" for reason, n in seen.missed.items()]
        return Verdict("hits", claim, False, detail + "".join(hints))
    detail = f"{wanted} of {seen.prompt_tokens} tokens, {total} of {total} prompts"
    if told < blocks:
        detail += f"; but the connector counted {told:.0f} of {blocks} blocks: hits of vLLM's own?"
    return Verdict("hits", claim, told >= blocks > 0, detail)


def _hint(reason: str) -> str:
    return {
        "absent": "has the daemon memory enough (--dram-bytes)?",
        "deadline": "the machine is too busy, or give it longer (kvtier.onboard_wait_seconds)",
        "unavailable": "the daemon's answers came too late, or it is gone: is the machine busy?",
    }.get(reason, "see vLLM's log")


def _same_as_own_hits(seen: Seen) -> Verdict:
    claim = "tokens after a hit from kvtier are those after a hit in vLLM's own cache"
    pairs = [
        (own, answer)
        for answers in seen.warm
        for own, answer in zip(seen.local, answers, strict=True)
        if own.hit_tokens == answer.hit_tokens
    ]
    total = sum(len(answers) for answers in seen.warm)
    if not pairs:
        return Verdict("tokens", claim, False if total else None, "no hits of equal length")
    wrong = [(own, place) for own, a in pairs if (place := first_difference(own, a)) is not None]
    if wrong:
        own, place = wrong[0]
        detail = (
            f"{len(wrong)} of {len(pairs)} prompts differ, the first at token {place + 1}, where"
            f" the two likeliest were {tie_gap(own, place):.2g} apart: please report this"
        )
        return Verdict("tokens", claim, False, detail)
    tokens = sum(len(answer.tokens) for _, answer in pairs)
    detail = f"{tokens} of {tokens} tokens, {len(pairs)} prompts"
    if len(pairs) < total:
        detail += f"; {total - len(pairs)} more had hits of another length and are not compared"
    return Verdict("tokens", claim, True, detail)


def _same_as_cold(seen: Seen) -> Verdict:
    claim = f"and those of a cold prefill, up to a tie of less than {TIE_LOGPROBS:g}"
    others = [seen.filled, *seen.warm] if seen.filled else []
    if not others:
        return Verdict("tokens_cold", claim, None, "it did not come so far")
    ties = own_differences = 0
    wrong: list[str] = []
    for answers in others:
        for number, (cold, answer) in enumerate(zip(seen.cold, answers, strict=True)):
            place = first_difference(cold, answer)
            if place is None:
                continue
            if tie_gap(cold, place) < TIE_LOGPROBS:
                ties += 1
            elif answer.hit_tokens and first_difference(seen.local[number], answer) is None:
                own_differences += 1
            else:
                gap = tie_gap(cold, place)
                wrong.append(f"prompt {number + 1} at token {place + 1}, gap {gap:.2g}")
    total = sum(len(answers) for answers in others)
    if wrong:
        return Verdict("tokens_cold", claim, False, f"{len(wrong)} of {total}: {wrong[0]}")
    detail = f"{total} of {total} answers"
    if ties:
        detail += f", {ties} up to a tie"
    if own_differences:
        detail += f", {own_differences} up to where vLLM's own hit differs in the same way"
    return Verdict("tokens_cold", claim, True, detail)


def _warm(seen: Seen, most: float) -> Verdict:
    claim = f"after a restart of vLLM the first token comes in at most {most:g} of the cold time"
    ratio = warm_ratio(seen)
    if ratio is None:
        return Verdict("warm", claim, None, "it did not come so far")
    cold = median(answer.first_seconds for answer in seen.cold)
    return Verdict(
        "warm", claim, ratio <= most, f"{ratio * cold:.4g} s / {cold:.4g} s = {ratio:.3f}"
    )


def _overhead(seen: Seen, most: float) -> Verdict:
    claim = f"a load of misses takes at most {most:.0%} longer with kvtier"
    found = overhead(seen)
    if found is None:
        return Verdict("overhead", claim, None, "it did not come so far")
    rounds = ", ".join(
        f"{median(with_):.3g} s / {median(without):.3g} s" for without, with_ in seen.loads
    )
    return Verdict("overhead", claim, found <= most, f"{found:+.1%} ({rounds})")


def _survives(seen: Seen) -> Verdict:
    claim = "vLLM serves on when the daemon is killed, and uses it again when it is back"
    killed = seen.killed
    if killed is None:
        return Verdict("restart", claim, None, "a daemon given by --socket is not killed")
    if not killed.was_killed:
        return Verdict("restart", claim, None, "it did not come so far")
    if killed.during is None:
        return Verdict("restart", claim, False, "no answer while the daemon was gone")
    place = first_difference(killed.cold, killed.during)
    if place is not None and tie_gap(killed.cold, place) >= TIE_LOGPROBS:
        return Verdict("restart", claim, False, f"another token at {place + 1} than without kvtier")
    detail = f"answered in {killed.during_seconds:.3g} s (without kvtier {killed.cold_seconds:.3g})"
    if killed.during_seconds > killed.cold_seconds + KILL_SLACK_SECONDS:
        return Verdict("restart", claim, False, detail)
    if not killed.is_offloading_again:
        return Verdict("restart", claim, False, detail + "; nothing was offloaded after it")
    return Verdict("restart", claim, True, detail)


def all_hold(verdicts: Sequence[Verdict]) -> bool:
    """None of them fails, and something was checked."""
    return any(v.holds for v in verdicts) and all(v.holds is not False for v in verdicts)
