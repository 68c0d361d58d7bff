"""One acquire as another thread makes it; of the planning it sees its attempt alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.connector.client_api import LeaseLike
from kvtier.connector.desk import Desk
from kvtier.connector.requests import Attempt
from kvtier.connector.waiting import sources_of
from kvtier.types import Cut

# A daemon short of slots gives the namespace a slab, which this engine must map first: that takes
# milliseconds. So it is asked again after these, as long as that brings nothing. A prefix that is
# simply larger than memory costs them in vain.
GROW_PAUSES_SECONDS = (0.01, 0.03, 0.06)
_MAY_GROW = (Cut.NO_SPACE, Cut.UNMAPPED)


class AcquireCall:
    """Brings a lease of the prompt's good blocks, or None where there was nothing to ask for."""

    def __init__(
        self,
        desk: Desk,
        namespace: Any,
        prompt: Sequence[bytes],
        attempt: Attempt,
        failed: frozenset[bytes],
        request_id: str = "",
    ) -> None:
        self._desk = desk
        self._namespace = namespace
        self._prompt = prompt
        self._attempt = attempt
        self._request_id = request_id
        self._failed = failed  # Hashes whose load failed lately.

    def __call__(self) -> LeaseLike | None:
        attempt = self._attempt
        hashes = _good_prefix(self._prompt, self._failed) if self._failed else self._prompt
        attempt.asked_count = len(hashes)
        if self._is_unwanted() or len(hashes) <= attempt.skip_count:
            return None
        lease = self._acquire(hashes)
        attempt.tiers = lease.tiers
        if attempt.wait_until is not None:
            lease = self._acquire_more(hashes, lease)
        if self._is_unwanted() and lease.lease_id is not None:
            # Here: an engine that does nothing has its next hook far off.
            self._desk.client.release([lease])
            return None
        return lease

    def _acquire(self, hashes: Sequence[bytes]) -> LeaseLike:
        return self._desk.client.acquire(
            self._namespace,
            hashes,
            lease_seconds=self._desk.settings.lease_seconds,
            wait_seconds=self._left_seconds(),
            skip_count=self._attempt.skip_count,
            request_id=self._request_id,
        )

    def _acquire_more(self, hashes: Sequence[bytes], lease: LeaseLike) -> LeaseLike:
        """Ask again where room for the rest may be on its way; nothing is held meanwhile."""
        pauses = iter(GROW_PAUSES_SECONDS)
        while lease.cut in _MAY_GROW and not self._is_unwanted():
            pause = next(pauses, None)
            if pause is None or pause >= self._left_seconds():
                break
            before, before_count = self._attempt.tiers, lease.leased_count
            if lease.lease_id is not None:
                self._desk.client.release([lease])
            self._desk.control.pause(pause)
            lease = self._acquire(hashes)
            # What we had promoted ourselves did not come from memory.
            again_count = min(before_count, lease.leased_count)
            self._attempt.tiers = (
                *sources_of(before, before_count, 0, again_count),
                *sources_of(lease.tiers, lease.leased_count, again_count, lease.leased_count),
            )
            if lease.leased_count > before_count:
                pauses = iter(GROW_PAUSES_SECONDS)
        return lease

    def _is_unwanted(self) -> bool:
        return self._attempt.is_abandoned

    def _left_seconds(self) -> float:
        wait_until = self._attempt.wait_until
        return 0.0 if wait_until is None else max(0.0, wait_until - self._desk.clock.now())


def _good_prefix(hashes: Sequence[bytes], failed: frozenset[bytes]) -> Sequence[bytes]:
    """Up to the first hash whose load failed lately: O(blocks)."""
    for index, block_hash in enumerate(hashes):
        if block_hash in failed:
            return hashes[:index]
    return hashes
