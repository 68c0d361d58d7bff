"""What the daemon remembers for `kvtier explain`, within a fixed number of bytes.

Removed blocks, blocks that were asked for and not found, requests by the engine's id, slow calls
and what happened to the daemon as a whole. Everything is written on the event loop; the oldest
gives way.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtier.core.instructions import BlocksRemoved, NamespaceCleared
from kvtier.server.block_ring import BlockRing, Remembered, Shorts
from kvtier.types import (
    BlockHash,
    CommitOutcome,
    Cut,
    NamespaceId,
    PackedHashes,
    RemovedFor,
    SessionId,
    TierName,
)

SLOW_CALLS_MAX = 64
HAPPENINGS_MAX = 64
# Beside its hashes, about what one remembered request takes.
REQUEST_BYTES = 640
REQUEST_HASHES_BYTES_MAX = 64 << 10
_REASONS = tuple(RemovedFor)
_TIERS = tuple(TierName)
# Shares of the budget, in eighths.
_REMOVED_SHARE, _MISSED_SHARE, _REQUEST_SHARE = 5, 1, 2


@dataclass(frozen=True, slots=True)
class RequestCall:
    """One Match or Acquire that named its request."""

    request_id: str
    call: str
    session: SessionId
    namespace: NamespaceId
    at: float
    seconds: float
    hashes: PackedHashes  # The leading ones, as far as the budget allows.
    asked_count: int
    found_count: int
    tiers: tuple[tuple[TierName, int], ...]
    cut: Cut
    missed: BlockHash | None  # The first block that was not found.
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class SlowCallSeen:
    call: str
    at: float
    seconds: float
    request_id: str
    block_count: int
    outcome: str
    session: SessionId | None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class HappeningSeen:
    what: str
    at: float
    namespace: NamespaceId | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class BlockSeen:
    """Something that happened to a block."""

    what: str  # "removed", "missed", "refused".
    why: str
    tier: str
    at: float


class History:
    """Belongs to the event loop."""

    def __init__(self, *, budget_bytes: int) -> None:
        self._removed = BlockRing(budget_bytes * _REMOVED_SHARE // 8)
        self._missed = BlockRing(budget_bytes * _MISSED_SHARE // 8)
        self._requests_bytes_max = budget_bytes * _REQUEST_SHARE // 8
        self._requests_bytes = 0
        # By tenant and request id; a request's calls are few, and go together.
        self._requests: OrderedDict[tuple[str, str], dict[str, RequestCall]] = OrderedDict()
        self.slow_calls: deque[SlowCallSeen] = deque(maxlen=SLOW_CALLS_MAX)
        self.happenings: deque[HappeningSeen] = deque(maxlen=HAPPENINGS_MAX)

    @property
    def taken_bytes(self) -> int:
        return self._removed.taken_bytes + self._missed.taken_bytes + self._requests_bytes

    # --------------------------------------------------------------------------------- writing

    def on_removed(self, event: BlocksRemoved, now: float) -> None:
        self._removed.add(
            event.namespace,
            event.hashes,
            why=_REASONS.index(event.reason),
            tier=_TIERS.index(event.tier),
            at=now,
        )

    def on_cleared(self, event: NamespaceCleared, now: float) -> None:
        self.note(HappeningSeen("cleared", now, event.namespace, f"{event.voided_count} blocks"))

    def note(self, happening: HappeningSeen) -> None:
        """Something happened to the daemon, or to a whole namespace."""
        self.happenings.append(happening)

    def note_missed(self, namespace: NamespaceId, block: BlockHash, cut: Cut, now: float) -> None:
        """The first block of a prefix that was not found, or not leased."""
        self._missed.add(namespace, [block], why=cut, tier=0, at=now)

    def note_refused(
        self, namespace: NamespaceId, hashes: Sequence[BlockHash], outcomes: bytes, now: float
    ) -> None:
        """Blocks that were offered and not taken."""
        for outcome in (CommitOutcome.NO_PARENT, CommitOutcome.VOID):
            refused = [block for block, one in zip(hashes, outcomes, strict=True) if one == outcome]
            why = len(Cut) + outcome
            self._missed.add(namespace, refused, why=why, tier=0, at=now)

    def note_request(self, seen: RequestCall) -> None:
        kept_bytes = min(REQUEST_HASHES_BYTES_MAX, self._requests_bytes_max // 4)
        if len(seen.hashes.packed) > kept_bytes:
            size = len(seen.hashes[0])
            kept = seen.hashes.packed[: kept_bytes // size * size]
            seen = replace(seen, hashes=PackedHashes(kept, size))
        key = (seen.tenant, seen.request_id)
        calls = self._requests.pop(key, None)
        if calls is None:
            calls = {}
        elif (before := calls.get(seen.call)) is not None:
            self._requests_bytes -= _bytes_of(before)
        calls[seen.call] = seen
        self._requests[key] = calls
        self._requests_bytes += _bytes_of(seen)
        while self._requests_bytes > self._requests_bytes_max:
            _, gone = self._requests.popitem(last=False)
            self._requests_bytes -= sum(map(_bytes_of, gone.values()))

    def forget(self, namespace: NamespaceId) -> None:
        """Nothing is left here of its blocks and of requests that asked for them."""
        self._removed.forget(namespace)
        self._missed.forget(namespace)
        for key, calls in list(self._requests.items()):
            for name in [name for name, one in calls.items() if one.namespace == namespace]:
                self._requests_bytes -= _bytes_of(calls.pop(name))
            if not calls:
                del self._requests[key]

    # --------------------------------------------------------------------------------- reading

    @property
    def remembered_since(self) -> float | None:
        """Every removal since then is here; None: every one since the daemon started."""
        return self._removed.oldest_at

    def request(self, request_id: str, tenant: str = "") -> list[RequestCall]:
        """Its calls, latest first."""
        calls = self._requests.get((tenant, request_id), {})
        return sorted(calls.values(), key=lambda call: -call.at)

    def events_of(self, namespace: NamespaceId, block: BlockHash, count: int) -> list[BlockSeen]:
        """What happened to the block, latest first."""
        removed = self._removed.latest(namespace, block, count)
        missed = self._missed.latest(namespace, block, count)
        found = [*map(_removal, removed), *map(_miss, missed)]
        return sorted(found, key=lambda seen: -seen.at)[:count]

    def namespaces_of(self, block: BlockHash) -> set[NamespaceId]:
        """In which of them anything is remembered of the block."""
        return self._removed.namespaces_of(block) | self._missed.namespaces_of(block)

    def last_removals(self, namespace: NamespaceId, shorts: Shorts) -> dict[int, BlockSeen]:
        """By short hash, the last removal of each of these."""
        found = self._removed.last_of(namespace, shorts)
        return {short: _removal(one) for short, one in found.items()}

    def last_refusals(self, namespace: NamespaceId, shorts: Shorts) -> dict[int, BlockSeen]:
        """By short hash, the last refusal of those that were never taken."""
        found = self._missed.last_of(namespace, shorts)
        return {short: _miss(one) for short, one in found.items() if one.why >= len(Cut)}


def _removal(one: Remembered) -> BlockSeen:
    return BlockSeen("removed", _REASONS[one.why].value, _TIERS[one.tier].value, one.at)


def _miss(one: Remembered) -> BlockSeen:
    if one.why >= len(Cut):
        outcome = CommitOutcome(one.why - len(Cut))
        return BlockSeen("refused", outcome.name.lower(), "", one.at)
    return BlockSeen("missed", Cut(one.why).name.lower(), "", one.at)


def _bytes_of(seen: RequestCall) -> int:
    return REQUEST_BYTES + len(seen.hashes.packed)
