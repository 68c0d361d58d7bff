"""When to try once more what is taken to be slower: only that tells when it no longer is; pure."""

from __future__ import annotations

# Of the time that the better way takes, so much is spent on trials of the other. At twice the cost
# one in 32 is tried, at little more almost each, and at a hundred times the cost one in 3,200.
RETRY_SHARE = 1 / 32


class Retries:
    """Saves up for the next trial."""

    def __init__(self) -> None:
        self._saved_seconds = 0.0

    def note_avoided(self, seconds: float) -> None:
        """The better way is to take so long."""
        self._saved_seconds += RETRY_SHARE * seconds

    def spend(self, extra_seconds: float) -> bool:
        """Whether a trial that takes so much longer is paid for; then it is to be made."""
        if extra_seconds > self._saved_seconds:
            return False
        self._saved_seconds = 0.0
        return True
