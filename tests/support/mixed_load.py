"""A mixed load on one namespace, from one seed: what engines and tools do, in any order.

Every byte that comes is compared with what its hash says. A load offloads, puts and evicts chains
of its own only, so that whoever reads its events knows what may be resident.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.client import Client, Namespace
from kvtier.errors import KVTierError
from tests.support import known_blocks
from tests.support.known_blocks import WrongBytes, chain_hashes, check_payload, payload_of

CHAIN_BLOCKS_MAX = 8
KNOWN_MAX = 64
WAIT_SECONDS_MAX = 1.0
HINTS: list[dict[str, Any]] = [
    {"paused_seconds": 60.0},
    {"session_end": True},
    {"turn_kind": "tool"},
    {"turn_kind": "user"},
]


@dataclass(frozen=True)
class LoadPlan:
    """What one load is to be; others: seeds of loads whose chains it reads, too."""

    seed: int
    pause_seconds: float
    others: Sequence[int]
    clears: bool


class MixedLoad:
    """Says, as it goes: made (before a chain of so many blocks is stored), stored (so many are
    resident by the daemon's word), evicting, clearing, cleared, hits (right bytes), wrong and
    refused."""

    def __init__(
        self, client: Client, namespace: Namespace, plan: LoadPlan, say: Callable[..., None]
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._plan = plan
        self._say = say
        self._rng = random.Random(plan.seed)
        self._known: dict[str, int] = {}  # Chain -> blocks.
        self._made_count = 0

    def run(self, ends: threading.Event) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.store_new, 8),
            (self.store_longer, 3),
            (self.onboard, 7),
            (self.get, 3),
            (self.prefetch, 2),
            (self.hint, 2),
            (self.evict, 1),
        ]
        clear_weight = 0.3 if self._plan.clears else 0.0
        choices = [one for one, _ in actions] + [self.clear]
        weights = [float(weight) for _, weight in actions] + [clear_weight]
        while not ends.is_set():
            (act,) = self._rng.choices(choices, weights)
            try:
                act()
            except WrongBytes as error:
                self._say(event="wrong", text=f"{act.__name__}: {error}")
            except (KVTierError, TimeoutError) as error:
                self._say(event="refused", name=type(error).__name__)
                time.sleep(0.02)
            ends.wait(self._rng.random() * 2 * self._plan.pause_seconds)

    # -------------------------------------------------------------------------------- storing

    def store_new(self) -> None:
        self._made_count += 1
        label = f"{self._plan.seed}:{self._made_count}"
        self._store(label, self._rng.randint(1, CHAIN_BLOCKS_MAX))

    def store_longer(self) -> None:
        """What is resident of the chain already is PRESENT."""
        if self._known:
            label = self._own_label()
            self._store(label, self._rng.randint(self._known[label], CHAIN_BLOCKS_MAX))

    def _store(self, label: str, count: int) -> None:
        hashes = chain_hashes(label, count)
        self._say(event="made", label=label, count=count)
        self._known[label] = count
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]
        if self._rng.random() < 0.5:
            stored_count = known_blocks.offload(self._client, self._namespace, hashes)
        else:
            block_bytes = self._namespace.block_bytes
            blocks = [(one, payload_of(one, block_bytes)) for one in hashes]
            done = self._client.put(self._namespace, blocks)
            stored_count = done.ready_count + done.present_count
        self._say(event="stored", label=label, count=stored_count)

    # -------------------------------------------------------------------------------- reading

    def onboard(self) -> None:
        wait_seconds = self._rng.choice([0.0, 0.02, WAIT_SECONDS_MAX])
        count = known_blocks.onboard(
            self._client, self._namespace, self._some_chain(), wait_seconds=wait_seconds
        )
        self._say(event="hits", count=count)

    def get(self) -> None:
        hashes = self._some_chain()
        found = self._client.get(self._namespace, hashes)
        for one, data in zip(hashes, found, strict=False):
            check_payload(one, data, "got by value")
        self._say(event="hits", count=len(found))

    # ---------------------------------------------------------------------------- the others

    def prefetch(self) -> None:
        self._client.prefetch(self._namespace, self._some_chain())

    def hint(self) -> None:
        self._client.hint(self._namespace, self._some_chain(), **self._rng.choice(HINTS))

    def evict(self) -> None:
        if self._known:
            label = self._own_label()
            del self._known[label]  # For good: nobody stores it again.
            self._say(event="evicting", label=label)
            self._client.evict(self._namespace, chain_hashes(label, CHAIN_BLOCKS_MAX))

    def clear(self) -> None:
        self._say(event="clearing")
        self._known.clear()
        self._client.clear(self._namespace)
        self._say(event="cleared")

    # -------------------------------------------------------------------------------- choosing

    def _own_label(self) -> str:
        return self._rng.choice(list(self._known))

    def _some_chain(self) -> list[bytes]:
        """Of this load or of another one."""
        label = f"{self._plan.seed}:0"
        if self._plan.others and self._rng.random() < 0.3:
            label = f"{self._rng.choice(self._plan.others)}:{self._rng.randint(1, 40)}"
        elif self._known:
            label = self._own_label()
        return chain_hashes(label, CHAIN_BLOCKS_MAX)
