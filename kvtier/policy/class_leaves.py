"""The leaves of one class, by time of use: the oldest and the youngest of them.

Two heaps that forget lazily: an entry counts while the block still has that time and class.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Entry = tuple[float, int]  # Time of use, row; both negative in the heap of the youngest.


class ClassLeaves:
    __slots__ = ("count_max", "old", "young")

    def __init__(self) -> None:
        self.old: list[Entry] = []
        self.young: list[Entry] = []
        self.count_max = 64  # Beyond it most of them may count no more.

    def push(self, used_at: float, row: int) -> None:
        heapq.heappush(self.old, (used_at, row))
        heapq.heappush(self.young, (-used_at, -row))

    def keep(self, counts: Callable[[float, int], bool]) -> None:
        """Forget the entries that count no more, and those that say the same twice."""
        found = {entry for entry in self.old if counts(*entry)}
        found |= {(-at, -row) for at, row in self.young if counts(-at, -row)}
        self.old = sorted(found)  # Sorted lists are heaps.
        self.young = sorted((-at, -row) for at, row in found)
        self.count_max = 2 * len(found) + 64
