"""Events of what engines say about a prefix ahead of time; part of events.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.types import BlockHash, NamespaceId


@dataclass(frozen=True, slots=True)
class HintSessionEnd:
    """The prefix will not be continued."""

    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    done_count: int = 0  # Set by the manager when the event is continued.


@dataclass(frozen=True, slots=True)
class HintPaused:
    """The prefix will be continued, but not at once: let it go down while it may."""

    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    done_count: int = 0  # Set by the manager when the event is continued.


@dataclass(frozen=True, slots=True)
class HintTurnKind:
    """The last turn of the prefix was of this kind. Words of engines have numbers from 1 on."""

    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    turn_kind: int
    done_count: int = 0  # Set by the manager when the event is continued.


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Promote this prefix before anybody asks for it, after everything that somebody waits for."""

    namespace: NamespaceId
    hashes: Sequence[BlockHash]
    done_count: int = 0  # Set by the manager when the event is continued.
    promoting_count: int = 0  # Likewise.
