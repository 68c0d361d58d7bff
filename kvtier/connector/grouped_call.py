"""What is asked of the daemon for a prefix that lies in several KV groups, in one go.

One answer: how long the prefix is that every group can serve, and a lease on what each of them
must load for it. Groups are namespaces of their own and the daemon knows of no tie between them;
what is leased in all of them at once is there, and less than that is a miss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier.connector.acquire_call import GROW_PAUSES_SECONDS
from kvtier.connector.client_api import LeaseLike
from kvtier.connector.desk import Desk
from kvtier.namespace import NamespaceSpec
from kvtier.types import Cut, Presence

_MAY_COME = (Cut.NO_SPACE, Cut.UNMAPPED, Cut.MISS)  # A miss: gone since it was matched.


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that all groups can serve."""

    token_count: int
    wanted: tuple[tuple[int, ...], ...]  # By group: its blocks that are needed, ascending.


class HitFinder(Protocol):
    """The engine's own rule of what a prefix needs of each group. Called in any thread."""

    def find(
        self, hashes: Sequence[bytes], present: Sequence[Collection[bytes]], token_limit: int
    ) -> Hit:
        """The longest hit of at most `token_limit` tokens; `present[g]` are hashes of group g."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group of the engine's."""

    spec: NamespaceSpec
    namespace: Any
    hash_factor: int  # Hashes of the engine's to a block of this group; its last one names it.

    def hashes_of(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Of the group's full blocks."""
        return [bytes(one) for one in hashes[self.hash_factor - 1 :: self.hash_factor]]

    @property
    def block_bytes(self) -> int:
        return self.spec.shard_bytes * self.spec.shard_count


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The lease of one group."""

    lease: LeaseLike
    slots: dict[int, int]  # By the position of the block in the prefix.
    hashes: dict[int, bytes]
    offset: int  # Blocks of the lease that are not loaded: the engine has them.


@dataclass(frozen=True, slots=True, eq=False)
class GroupedAnswer:
    token_count: int
    lower_bytes: int = 0  # Of what must be loaded, in lower tiers.
    parts: dict[int, Part] | None = None  # By group; None: nothing is leased.
    cut: Cut = Cut.NONE
    # By group, of the hashes asked about; made here, as sets of long prompts take their time.
    present: tuple[frozenset[bytes], ...] = ()
    absent: tuple[frozenset[bytes], ...] = ()


@dataclass(slots=True, eq=False)
class GroupedAttempt:
    """One call; what comes for an abandoned one is released at once."""

    hashes: Sequence[bytes]
    token_limit: int
    local_tokens: int
    leases: bool = True  # Else it is only asked how much there is.
    wait_until: float | None = None
    learned_counts: tuple[int, ...] = ()
    is_abandoned: bool = False
    answer: GroupedAnswer | None = None
    block_count: int = 0  # Pinned, or may come to be.


@dataclass(slots=True)
class GroupedCall:
    """Made by another thread; of the planning it sees its attempt alone."""

    desk: Desk
    groups: Sequence[Group]
    finder: HitFinder
    attempt: GroupedAttempt
    failed: frozenset[bytes]
    request_id: str
    _held: list[LeaseLike] = field(default_factory=list)

    def __call__(self) -> GroupedAnswer:
        answer = self._ask()
        pauses = iter(GROW_PAUSES_SECONDS)
        while answer.cut in _MAY_COME and not self.attempt.is_abandoned:
            pause = next(pauses, None)
            if pause is None or pause >= self._left_seconds():
                break
            self.desk.control.pause(pause)
            answer = self._ask()
        if self.attempt.is_abandoned:
            self._give_back()
            return GroupedAnswer(0)
        return answer

    def _ask(self) -> GroupedAnswer:
        attempt = self.attempt
        found = tuple(self._presence(group) for group in self.groups)
        present = tuple(
            frozenset(one for one, at in zip(hashes, where, strict=True) if at)
            for hashes, where in found
        )
        absent = tuple(
            frozenset(hashes) - there for (hashes, _), there in zip(found, present, strict=True)
        )
        good = [there - self.failed for there in present]
        hit = self.finder.find(attempt.hashes, good, attempt.token_limit)
        if hit.token_count <= attempt.local_tokens:
            return GroupedAnswer(hit.token_count, present=present, absent=absent)
        lower = 0
        for group, (_, where), wanted in zip(self.groups, found, hit.wanted, strict=True):
            first = attempt.local_tokens // group.spec.block_tokens
            count = sum(where[i] == Presence.LOWER for i in wanted if i >= first)
            lower += count * group.block_bytes
        if not attempt.leases or attempt.is_abandoned:
            return GroupedAnswer(hit.token_count, lower, present=present, absent=absent)
        try:
            parts, cut = self._lease(hit)
        except BaseException:
            self._give_back()
            raise
        return GroupedAnswer(hit.token_count, lower, parts, cut, present, absent)

    def _presence(self, group: Group) -> tuple[list[bytes], bytes]:
        """Of the group's full blocks; of a chain, what follows a gap is as good as absent."""
        hashes = group.hashes_of(self.attempt.hashes)
        if not hashes:
            return hashes, b""
        found = self.desk.client.match(group.namespace, hashes, request_id=self.request_id)
        if not group.spec.chained:  # A daemon that knows only chains tells of none.
            return hashes, found.presence.ljust(len(hashes), bytes([Presence.ABSENT]))
        counts = (
            (Presence.MEMORY, found.memory_count),
            (Presence.LOWER, found.matched_count - found.memory_count),
            (Presence.ABSENT, len(hashes) - found.matched_count),
        )
        return hashes, b"".join(bytes([where]) * count for where, count in counts)

    def _lease(self, hit: Hit) -> tuple[dict[int, Part] | None, Cut]:
        """All that the hit needs, or nothing."""
        parts: dict[int, Part] = {}
        for number, (group, wanted) in enumerate(zip(self.groups, hit.wanted, strict=True)):
            hashes = group.hashes_of(self.attempt.hashes)
            first = self.attempt.local_tokens // group.spec.block_tokens
            positions = [index for index in wanted if index >= first]
            if not positions:
                continue
            skip, asked = 0, [hashes[index] for index in positions]
            if group.spec.chained:
                skip, asked = first, hashes[: positions[-1] + 1]
            lease = self.desk.client.acquire(
                group.namespace,
                asked,
                lease_seconds=self.desk.settings.lease_seconds,
                wait_seconds=self._left_seconds(),
                skip_count=skip,
                request_id=self.request_id,
            )
            if lease.lease_id is not None:
                self._held.append(lease)
            if lease.lease_id is None or lease.leased_count < len(asked):
                self._give_back()
                return None, lease.cut
            slots = dict(zip(positions, lease.slots.tolist(), strict=True))
            named = {index: hashes[index] for index in positions}
            parts[number] = Part(lease, slots, named, skip)
        return parts, Cut.NONE

    def _give_back(self) -> None:
        held, self._held = self._held, []
        if held:
            self.desk.client.release(held)

    def _left_seconds(self) -> float:
        wait_until = self.attempt.wait_until
        return 0.0 if wait_until is None else max(0.0, wait_until - self.desk.clock.now())
