"""Publishes what the tiers have: from the core's instructions to KV cache events.

Subscribers route requests by them, so nothing may stand in their books that cannot be fetched: a
block that leaves a medium is announced, a clear too, and a new life of the daemon begins with one.
When events had to be dropped, or somebody asks for more than is kept, everything is announced
anew, as hashes alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvtier.clock import wall_seconds
from kvtier.config_events import EventsConfig
from kvtier.core.instructions import (
    BlocksRemoved,
    BlocksStored,
    BlocksTakenIn,
    NamespaceCleared,
)
from kvtier.errors import ConfigError
from kvtier.server.base import Base
from kvtier.server.kv_ledger import PART_COUNT, Ledger, Part
from kvtier.server.kv_wire import (
    PLACE_OF,
    Cleared,
    Event,
    Removed,
    Stored,
    WireForm,
    WirePlace,
    weight_of,
)
from kvtier.server.threads import call_soon
from kvtier.types import BlockHash, NamespaceId

if TYPE_CHECKING:
    from kvtier.server.kv_publisher import Publisher

log = logging.getLogger(__name__)

# Announcing anew gives way to the loop's other work, and comes at most so often.
PAUSE_SECONDS = 0.002
AGAIN_SECONDS = 10.0
# A hash says nothing of its parent when it is announced alone.
ALONE_BLOCKS = 512

TokensOf = Callable[[Sequence[BlockHash]], Sequence[int]]


class KvEvents:
    """On the event loop: books what is where, and hands events to the publisher's thread."""

    def __init__(
        self,
        config: EventsConfig,
        base: Base,
        tokens_of: TokensOf,
        loop: asyncio.AbstractEventLoop,
        tenants: Collection[str] = ("",),
    ) -> None:
        """Binds the sockets; raises ConfigError. `tenants`: whose blocks are told of."""
        self._tenants = tenants
        self._config, self._namespaces, self._tokens_of = config, base.namespaces, tokens_of
        self._loop, self._metrics = loop, base.metrics.events
        self._node = config.node or socket.gethostname()
        self._ledgers: dict[NamespaceId, Ledger] = {}
        self._topic_of: dict[NamespaceId, bytes] = {}
        self._topics: set[bytes] = set()
        self._stale: set[bytes] = set()  # Topics of which events were dropped.
        self._rounds: dict[bytes, int] = {}  # Of announcing anew; the last one counts.
        self._announced_at: dict[bytes, float] = {}
        self._trash: list[Part] = []
        self._publisher = _open_publisher(config, partial(call_soon, loop), self._on_short)
        self._metrics.waiting_blocks.set_function(lambda: self.waiting_count)

    def start(self) -> None:
        self._publisher.start()

    @property
    def waiting_count(self) -> int:
        return self._publisher.waiting_count

    def on_stored(self, event: BlocksStored) -> None:
        if not self._is_told_of(event.namespace):
            return
        self._ledger(event.namespace).note_stored(event.hashes, event.tier)
        spec = self._namespaces.get(event.namespace).spec
        stored = Stored(
            tuple(event.hashes),
            event.parent,
            spec.block_tokens,
            PLACE_OF[event.tier],
            self._tokens_of(event.hashes),
        )
        self._put(self._topic(event.namespace), stored)

    def on_taken_in(self, event: BlocksTakenIn) -> None:
        """As hashes alone: their tokens died with whoever committed them."""
        if not self._is_told_of(event.namespace):
            return
        hashes: list[bytes] = [
            block
            for block, is_kept in zip(event.hashes, event.kept.tolist(), strict=True)
            if is_kept
        ]
        self._ledger(event.namespace).note_stored(hashes, event.tier)
        block_tokens = self._namespaces.get(event.namespace).spec.block_tokens
        stored = Stored(hashes, None, block_tokens, PLACE_OF[event.tier])
        self._put(self._topic(event.namespace), stored)

    def on_removed(self, event: BlocksRemoved) -> None:
        if not self._is_told_of(event.namespace):
            return
        gone = self._ledger(event.namespace).note_removed(event.hashes, event.tier)
        if gone:
            self._put(self._topic(event.namespace), Removed(gone, PLACE_OF[event.tier]))

    def on_cleared(self, event: NamespaceCleared) -> None:
        """The wire has a clear of the topic only; what its other namespaces have is announced
        anew after it."""
        if not self._is_told_of(event.namespace):
            return
        topic = self._topic(event.namespace)
        if not self._trash:
            self._loop.call_soon(self._empty_trash)
        self._trash += self._ledger(event.namespace).take_parts()
        self._put(topic, Cleared())
        if any(self._ledgers[one] for one in self._of_topic(topic)):
            self._announce(topic)

    def forget(self, namespace: NamespaceId) -> None:
        """What was published of its topic, with token ids perhaps, cannot be fetched any more."""
        if self._is_told_of(namespace):
            self._publisher.forget(self._topic(namespace))

    def close(self) -> None:
        """Nothing can be fetched any more."""
        for topic in self._topics:
            self._publisher.put(topic, Cleared())
        self._publisher.close()

    # --------------------------------------------------------------------------- announcing anew

    def _on_short(self, topic: bytes) -> None:
        """Somebody asked for more than is kept."""
        if self._loop.time() >= self._announced_at.get(topic, -AGAIN_SECONDS) + AGAIN_SECONDS:
            self._announce(topic)

    def _announce(self, topic: bytes) -> None:
        self._rounds[topic] = self._rounds.get(topic, 0) + 1
        self._announced_at[topic] = self._loop.time()
        self._metrics.announced_count.inc()
        self._put(topic, Cleared())
        self._go_on(topic, self._rounds[topic], self._all_of(topic))

    def _all_of(self, topic: bytes) -> Iterator[list[Event]]:
        """What the topic's namespaces have, so much at a time that little is read between two
        pauses; changes meanwhile are announced beside it, and those are later."""
        events: list[Event] = []
        read = count = 0  # Parts and blocks since the last pause.
        for namespace in self._of_topic(topic):
            found: dict[WirePlace, list[bytes]] = {}
            for number in range(PART_COUNT):
                for place, hashes in self._ledgers[namespace].blocks(number):
                    found.setdefault(place, []).extend(hashes)
                    count += len(hashes)
                read += 1
                if count >= ALONE_BLOCKS or read >= PART_COUNT:
                    yield [*events, *self._alone(namespace, found)]
                    events, found, read, count = [], {}, 0, 0
            events += self._alone(namespace, found)
        yield events

    def _alone(
        self, namespace: NamespaceId, found: Mapping[WirePlace, Sequence[bytes]]
    ) -> list[Event]:
        block_tokens = self._namespaces.get(namespace).spec.block_tokens
        return [
            Stored(tuple(hashes[first : first + ALONE_BLOCKS]), None, block_tokens, place)
            for place, hashes in found.items()
            for first in range(0, len(hashes), ALONE_BLOCKS)
        ]

    def _go_on(self, topic: bytes, round_number: int, parts: Iterator[list[Event]]) -> None:
        if topic in self._stale or round_number != self._rounds[topic]:
            return  # Another one follows, or has begun.
        if self._has_room():
            events = next(parts, None)
            if events is None:
                return
            for event in events:
                self._publisher.put(topic, event)
        self._loop.call_later(PAUSE_SECONDS, self._go_on, topic, round_number, parts)

    def _put(self, topic: bytes, event: Event) -> None:
        weight = weight_of(event)
        if topic not in self._stale:
            if self.waiting_count + weight <= self._config.queue_blocks_max:
                self._publisher.put(topic, event)
                return
            self._stale.add(topic)
            log.warning(
                "kv events dropped, all will be announced anew",
                extra={"topic": topic.decode(), "waiting": self.waiting_count},
            )
            self._loop.call_later(PAUSE_SECONDS, self._recover, topic)
        self._metrics.lost_blocks.inc(weight)

    def _recover(self, topic: bytes) -> None:
        if not self._has_room():
            self._loop.call_later(PAUSE_SECONDS, self._recover, topic)
            return
        self._stale.discard(topic)
        self._announce(topic)

    def _has_room(self) -> bool:
        return self.waiting_count <= self._config.queue_blocks_max // 2

    # --------------------------------------------------------------------------------- helpers

    def _is_told_of(self, namespace: NamespaceId) -> bool:
        """A hash stands for its prefix there, as routers count it; blocks of the same hash that are
        of use only beside those are not told of."""
        spec = self._namespaces.get(namespace).spec
        return spec.chained and spec.tenant in self._tenants

    def _ledger(self, namespace: NamespaceId) -> Ledger:
        found = self._ledgers.get(namespace)
        if found is None:
            found = self._ledgers[namespace] = Ledger()
        return found

    def _topic(self, namespace: NamespaceId) -> bytes:
        found = self._topic_of.get(namespace)
        if found is None:
            spec = self._namespaces.get(namespace).spec
            names = {"node": self._node, "model": spec.model, "tenant": spec.tenant}
            found = self._config.topic.format(**names).encode()
            self._topic_of[namespace] = found
            if found not in self._topics:
                self._topics.add(found)  # What an earlier life of the daemon announced is void.
                self._put(found, Cleared())
        return found

    def _of_topic(self, topic: bytes) -> list[NamespaceId]:
        return [one for one in self._ledgers if self._topic_of.get(one) == topic]

    def _empty_trash(self) -> None:
        self._trash.pop().clear()
        if self._trash:
            self._loop.call_soon(self._empty_trash)


def _open_publisher(
    config: EventsConfig,
    post: Callable[[Callable[[], None]], None],
    on_short: Callable[[bytes], None],
) -> Publisher:
    try:
        import msgspec
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kv_events needs {error.name}: pip install 'kvtier[events]', or leave kv_events.bind "
            "and kv_events.connect empty"
        ) from None
    from kvtier.server.kv_publisher import Publisher

    form = WireForm(config.hash_form, msgspec.msgpack.Encoder().encode)
    try:
        return Publisher(
            config,
            form,
            on_short=lambda topic: post(partial(on_short, topic)),
            wall=wall_seconds,
        )
    except OSError as error:
        raise ConfigError(
            f"kv_events: cannot listen on {config.bind or config.replay_bind} ({error.strerror}): "
            "another process may have it"
        ) from None
