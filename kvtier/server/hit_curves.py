"""What memory of other sizes would hit of the requests that come: samples, of all of them and of
each tenant. Belongs to the event loop.

At most TENANTS_MAX tenants have a curve of their own, those that come first; with the one of all
that is 5 times 5 MiB. How much is sampled follows from how many blocks memory holds: few enough
that a request costs little, enough that memory is represented by some thousands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvtier.clock import Clock
from kvtier.core.events import Acquire, Commit
from kvtier.core.learning import keys_of
from kvtier.errors import UnknownNamespace
from kvtier.policy.hit_curve import HitCurve
from kvtier.server.namespaces import Namespaces, OpenedNamespace
from kvtier.types import BlockHash, NamespaceId

TENANTS_MAX = 4
HALF_LIFE_SECONDS = 3600.0
# So many sampled blocks stand for what memory holds now.
SAMPLED_IN_MEMORY = 4096


class HitCurves:
    """`told` is what `kvtier advise` asks for."""

    def __init__(
        self,
        namespaces: Namespaces,
        clock: Clock,
        *,
        dram_bytes: int,
        nvme_bytes: int,
        has_tenants: bool,
    ) -> None:
        """`has_tenants`: several; the only one's curve is that of all."""
        self._tenants_max = TENANTS_MAX if has_tenants else 0
        self._namespaces, self._clock = namespaces, clock
        self._dram_bytes, self._nvme_bytes = dram_bytes, nvme_bytes
        self._began = clock.now()
        self._all: HitCurve | None = None
        self._tenants: dict[str, HitCurve] = {}
        self._block_bytes = 0

    def on_acquire(self, event: Acquire) -> None:
        if event.lease is None:  # Not the slices after the first.
            self._note(event.namespace, event.hashes, event.skip_count)

    def on_commit(self, event: Commit) -> None:
        if not event.done_count:
            self._note(event.namespace, event.hashes, None)

    def told(self) -> dict[str, Any]:
        """For JSON: sizes now, and a curve of all and of each tenant."""
        curves = [] if self._all is None else [("", self._all), *self._tenants.items()]
        return {
            "dram_bytes": self._dram_bytes,
            "nvme_bytes": self._nvme_bytes,
            "block_bytes": self._block_bytes,
            "half_life_seconds": HALF_LIFE_SECONDS,
            "curves": [self._told(tenant, curve) for tenant, curve in curves],
        }

    def forget(self, tenant: str) -> None:
        """Its own curve, which the only tenant's is that of all; else that of all keeps samples of
        hashes that nobody can turn back."""
        self._tenants.pop(tenant, None)
        if not self._tenants_max:
            self._all, self._began = None, self._clock.now()

    def _told(self, tenant: str, curve: HitCurve) -> dict[str, Any]:
        hours = self._weighted_seconds() / 3600
        return {
            "tenant": tenant,
            "asked_blocks_per_hour": curve.asked_count / hours,
            "asked_tokens_per_hour": curve.asked_tokens / hours,
            "rate": curve.rate,
            "samples": curve.sample_count,
            "points": curve.points(),
        }

    def _weighted_seconds(self) -> float:
        """What the time since the start counts as what is longer ago counts less."""
        passed = max(1.0, self._clock.now() - self._began)
        kept = math.exp(-passed * math.log(2) / HALF_LIFE_SECONDS)
        return HALF_LIFE_SECONDS / math.log(2) * (1.0 - kept)

    def _note(
        self, number: NamespaceId, hashes: Sequence[BlockHash], counted_from: int | None
    ) -> None:
        try:
            namespace = self._namespaces.get(number)
        except UnknownNamespace:
            return  # The core refuses it.
        if not namespace.spec.chained or not len(hashes):
            return
        keys = keys_of(hashes)
        now = self._clock.now()
        self._block_bytes = namespace.slot_bytes * namespace.spec.shard_count
        for curve in self._curves(namespace):
            curve.note(
                keys,
                now,
                block_bytes=self._block_bytes,
                block_tokens=namespace.spec.block_tokens,
                counted_from=counted_from,
            )

    def _curves(self, namespace: OpenedNamespace) -> list[HitCurve]:
        if self._all is None:
            self._all = self._new()
        tenant = namespace.spec.tenant
        mine = self._tenants.get(tenant)
        if mine is None and len(self._tenants) < self._tenants_max:
            mine = self._tenants[tenant] = self._new()
        return [self._all] if mine is None else [self._all, mine]

    def _new(self) -> HitCurve:
        in_memory = self._dram_bytes / max(1, self._block_bytes)
        return HitCurve(
            rate=min(1.0, SAMPLED_IN_MEMORY / in_memory), half_life_seconds=HALF_LIFE_SECONDS
        )
