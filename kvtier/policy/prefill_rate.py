"""How long an engine computes for a token of a prompt, from its recent steps; pure."""

from __future__ import annotations

# A step with fewer tokens says little about what a token of a prefill costs.
RATE_TOKENS_MIN = 16
RATE_WEIGHT = 0.2
# Nor does one that is small beside the largest so far: what a step takes anyway, and a batch of
# decodes, would count as if a prefill did it.
LARGEST_SHARE = 0.25


class PrefillRate:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.token_seconds: float | None = None
        self._largest_count = RATE_TOKENS_MIN / LARGEST_SHARE

    def note(self, token_count: int, seconds: float) -> None:
        """A step took so long for so many tokens."""
        if token_count < max(RATE_TOKENS_MIN, LARGEST_SHARE * self._largest_count):
            return
        self._largest_count = max(self._largest_count, token_count)
        rate, known = seconds / token_count, self.token_seconds
        self.token_seconds = rate if known is None else known + RATE_WEIGHT * (rate - known)
