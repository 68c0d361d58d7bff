"""Classes of requests whose blocks are used again alike.

tenant x turn of the conversation x new tokens x time since the matched prefix was used x kind of
the turn, where an engine has said it; blocks that many requests share are in classes by how many.
Which features tell most was measured on public traces (docs/policies.md), but for kinds of turns,
which are not in them: the new tokens above all.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.policy.eviction import TURN_KINDS_MAX

TURNS = (2, 4)  # The first; the second and third; later ones.
NEW_TOKENS = (1_000, 4_000, 16_000, 48_000)
GAP_SECONDS = (20.0, 120.0)
SHARED_LOG2_MAX = 12
# So that one table row of 40 bins each stays below 2 MB, and evicting below a millisecond.
CLASS_COUNT_MAX = 4096

ENDED = 0  # The session is over.

_Name = tuple[int, ...]  # What makes a class; of requests: tenant, turn, new, gap, kind of turn.
_PARTS, _UNTOLD = 5, 0


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
        self._numbers: dict[_Name, int] = {}
        self._names: list[_Name] = [()]  # By class.
        self.group_of: list[int] = [-1]  # By class; -1: it leans on all blocks together.
        self.group_count = 0
        self._groups: dict[_Name, int] = {}
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
        name = (request.tenant, turn, new, gap, _UNTOLD)
        return self._numbers.get(name) or self._of_name(name)

    def of_turn_kind(self, kinds: npt.NDArray[np.int16], turn_kind: int) -> npt.NDArray[np.int16]:
        """The same classes, but of turns of this kind; those of shared blocks and ended sessions
        have none."""
        assert 0 < turn_kind <= TURN_KINDS_MAX, "a kind of turn that has no number"
        found = kinds.copy()
        for kind in np.unique(kinds).tolist():
            name = self._names[kind]
            if len(name) == _PARTS:
                told = (*name[:-1], turn_kind)
                if told in self._numbers or self.count < CLASS_COUNT_MAX:
                    found[kinds == kind] = self._of_name(told)
        return found

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

    def _of_name(self, name: _Name) -> int:
        """Of requests; their group is the class without its gap."""
        tenant, turn, new, _, turn_kind = name
        return self._number(name, (tenant, turn, new, turn_kind))

    def _number(self, name: _Name, group: _Name | None) -> int:
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
        self._names.append(name)
        return self.count - 1
