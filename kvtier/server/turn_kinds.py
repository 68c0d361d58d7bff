"""Numbers for the words by which engines call the kinds of their turns.

So no text of theirs is in the core's events, nor in what is recorded of them.
"""

from __future__ import annotations

from kvtier.policy.eviction import TURN_KINDS_MAX
from kvtier.types import NamespaceId


class TurnKinds:
    """From 1 on, in each namespace by itself, in the order of their coming; words too many share
    the last number."""

    def __init__(self) -> None:
        self._numbers: dict[NamespaceId, dict[str, int]] = {}

    def number(self, namespace: NamespaceId, word: str) -> int:
        numbers = self._numbers.setdefault(namespace, {})
        if word not in numbers and len(numbers) >= TURN_KINDS_MAX - 1:
            return TURN_KINDS_MAX
        return numbers.setdefault(word, len(numbers) + 1)
