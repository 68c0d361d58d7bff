"""Classes of requests whose blocks are used again alike.

tenant x turn of the conversation x new tokens x time since the matched prefix was used; blocks that
many requests share are in classes by how many. Which features tell most was measured on public
traces (docs/policies.md): the new tokens above all.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TURNS = (2, 4)  # The first; the second and third; later ones.
NEW_TOKENS = (1_000, 4_000, 16_000, 48_000)
GAP_SECONDS = (20.0, 120.0)
SHARED_LOG2_MAX = 12
# So that one table row of 40 bins each stays below 2 MB, and evicting below a millisecond.
CLASS_COUNT_MAX = 4096

ENDED = 0  # The session is over.


class Request(NamedTuple):
    """What is known of one when it comes."""

    tenant: int
    turn: int
    new_tokens: int
    gap_seconds: float | None  # None: no block of it is known.


# Of blocks that came without a request.
UNKNOWN = Request(0, 1, 0, None)


class ClassTable:
    """Numbers classes in the order of their coming, ENDED before all; a tenant too many shares
    those of tenant 0."""

    def __init__(self, *, features: bool = True) -> None:
        """Without features there is one class."""
        self._features = features
        self._numbers: dict[tuple[int, ...], int] = {}
        self.group_of: list[int] = [-1]  # By class; -1: it leans on all blocks together.
        self.group_count = 0
        self._groups: dict[tuple[int, ...], int] = {}
        self._shared: dict[int, tuple[npt.NDArray[np.int16], int]] = {}  # By tenant.

    @property
    def count(self) -> int:
        return len(self.group_of)

    def of_request(self, request: Request) -> int:
        if not self._features:
            return self._number((0,), None)
        turn = bisect_right(TURNS, request.turn)
        new = bisect_right(NEW_TOKENS, request.new_tokens)
        gap = (
            0 if request.gap_seconds is None else 1 + bisect_right(GAP_SECONDS, request.gap_seconds)
        )
        group = (request.tenant, turn, new)
        return self._number((*group, gap), group)

    def of_shared(self, tenant: int, uses_max: int) -> npt.NDArray[np.int16]:
        """Classes of blocks that many requests share, by log2 of how many; up to `uses_max`, and
        that of these from there on."""
        if not self._features:
            return np.full(SHARED_LOG2_MAX + 1, self._number((0,), None), np.int16)
        log = min(uses_max.bit_length() - 1, SHARED_LOG2_MAX)
        found, filled = self._shared.get(tenant, (None, -1))
        if found is None:
            found = np.zeros(SHARED_LOG2_MAX + 1, np.int16)
        for one in range(filled + 1, log + 1):
            found[one:] = self._number((tenant, one), None)
        self._shared[tenant] = found, max(filled, log)
        return found

    def _number(self, name: tuple[int, ...], group: tuple[int, ...] | None) -> int:
        found = self._numbers.get(name)
        if found is not None:
            return found
        if self.count >= CLASS_COUNT_MAX:
            return 1  # Some class.
        if group is None:
            self.group_of.append(-1)
        else:
            if group not in self._groups:
                self._groups[group] = self.group_count
                self.group_count += 1
            self.group_of.append(self._groups[group])
        self._numbers[name] = self.count - 1
        return self.count - 1
