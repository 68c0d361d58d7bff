"""The thread that sends KV cache events: a ZMQ socket for batches and one for who missed some.

Each topic counts its own batches from 0 in this life of the daemon, so that a subscriber of one
topic sees a gap only where it missed something. The event loop never waits for this thread, nor
this thread for a subscriber: a slow one loses batches, notices the gap and asks for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import SOCK_STREAM

import zmq

from kvtier.config_events import EventsConfig, connections
from kvtier.errors import ConfigError
from kvtier.server.activation import socket_mode
from kvtier.server.instance import clear_way
from kvtier.server.kv_wire import Event, WireForm, size_of, weight_of

log = logging.getLogger(__name__)

BATCH_EVENTS_MAX = 64
BATCH_BYTES_MAX = 16 << 10  # One event may be larger.
# What waits for one slow subscriber is buffer_bytes of full batches, and at least so many; beyond
# it, it loses batches. ZMQ counts batches only, and as many as vLLM allows would be gigabytes.
SEND_BATCHES_MIN = 1024
REPLAY_BATCHES_MAX = 100_000  # For one that does not read; beyond it the answer breaks off.
REQUEST_BYTES_MAX = 4096  # Of one frame of a request; the connection of a larger one is closed.
# Kept batches count with what they weigh besides their bytes.
KEPT_OVERHEAD_BYTES = 200
END_MARK = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 200  # For what was sent last, when the daemon ends.


class Publisher:
    """Owns both sockets. `put`, `waiting_count` and `close` are the event loop's."""

    def __init__(
        self,
        config: EventsConfig,
        form: WireForm,
        *,
        on_short: Callable[[bytes], None],
        wall: Callable[[], float],
    ) -> None:
        """Binds at once; raises OSError. `on_short` is told, in the thread, of a topic of which
        more was asked for than is kept."""
        self._form, self._buffer_bytes = form, config.buffer_bytes
        self._on_short, self._wall = on_short, wall
        # bounded: by the sink, which drops events when too many wait.
        self._events: deque[tuple[bytes, Event]] = deque()
        self._put_count = 0  # Blocks in events; written by the event loop …
        self._sent_count = 0  # … and by the thread.
        self._sequence_of: dict[bytes, int] = {}  # The next one's.
        # bounded: by buffer_bytes. (topic, sequence, batch)
        self._kept: deque[tuple[bytes, int, bytes]] = deque()
        self._kept_bytes = 0
        # bounded: by how many topics there are. Of topics whose batches are to go.
        self._forgotten: deque[bytes] = deque()
        self._oldest_of: dict[bytes, int] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_ending = False
        self._context = zmq.Context(io_threads=1)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.set_hwm(max(SEND_BATCHES_MIN, config.buffer_bytes // BATCH_BYTES_MAX))
            if config.bind:
                _bind(self._socket, config.bind)
            for endpoint in connections(config):
                self._socket.connect(endpoint)
            if config.replay_bind:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.set_hwm(REPLAY_BATCHES_MAX)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._replay.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
                _bind(self._replay, config.replay_bind)
        except zmq.ZMQError as error:
            self._free()
            raise OSError(error.errno, str(error)) from None
        except ConfigError:
            self._free()
            raise
        self._thread = threading.Thread(target=self._run, name="kvtier-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting_count(self) -> int:
        """Blocks in events that were put and are not sent yet."""
        return self._put_count - self._sent_count

    def put(self, topic: bytes, event: Event) -> None:
        self._events.append((topic, event))
        self._put_count += weight_of(event)
        self._ring()

    def forget(self, topic: bytes) -> None:
        """What was sent of the topic cannot be fetched again."""
        self._forgotten.append(topic)
        self._ring()

    def close(self, seconds: float = 1.0) -> None:
        """Send what waits, for at most so long."""
        self._is_ending = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join(seconds)
        if not self._thread.is_alive():
            self._free()

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:  # Ends: `close` is called when the daemon ends.
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while self._forgotten:
                self._drop_kept(self._forgotten.popleft())
            is_ending = self._is_ending  # Read before the events: those put before it are sent.
            while self._events:
                self._send(*self._take_batch())
            if self._replay is not None and self._replay in ready:
                self._answer_replay(self._replay)
            if is_ending:
                return

    def _take_batch(self) -> tuple[bytes, list[Event]]:
        """The next events, all of one topic."""
        topic, first = self._events.popleft()
        events, blocks, count_bytes = [first], weight_of(first), size_of(first)
        while self._events and len(events) < BATCH_EVENTS_MAX:
            following, event = self._events[0]
            count_bytes += size_of(event)
            if following != topic or count_bytes > BATCH_BYTES_MAX:
                break
            self._events.popleft()
            events.append(event)
            blocks += weight_of(event)
        self._sent_count += blocks
        return topic, events

    def _send(self, topic: bytes, events: Sequence[Event]) -> None:
        sequence = self._sequence_of.get(topic, 0)
        self._sequence_of[topic] = sequence + 1
        batch = self._form.batch(self._wall(), events)
        # Never waits: a subscriber that is too far behind loses it.
        self._socket.send_multipart([topic, sequence.to_bytes(8, "big"), batch], copy=False)
        self._kept.append((topic, sequence, batch))
        self._kept_bytes += len(batch) + KEPT_OVERHEAD_BYTES
        while self._kept_bytes > self._buffer_bytes and len(self._kept) > 1:
            old_topic, old, dropped = self._kept.popleft()
            self._kept_bytes -= len(dropped) + KEPT_OVERHEAD_BYTES
            self._oldest_of[old_topic] = old + 1

    def _drop_kept(self, topic: bytes) -> None:
        gone = sum(len(one) + KEPT_OVERHEAD_BYTES for its, _, one in self._kept if its == topic)
        self._kept = deque(one for one in self._kept if one[0] != topic)
        self._kept_bytes -= gone
        self._oldest_of[topic] = self._sequence_of.get(topic, 0)

    def _answer_replay(self, socket: zmq.Socket[bytes]) -> None:
        """One request: [who, "", first sequence] and, ours alone, a topic; without one, all."""
        frames = socket.recv_multipart()
        if len(frames) not in (3, 4) or len(frames[2]) < 8:
            log.warning("replay request not understood", extra={"frames": len(frames)})
            return
        who, first = frames[0], int.from_bytes(frames[2][:8], "big")
        wanted = frames[3] if len(frames) == 4 else None
        # An answer that its reader does not read breaks off, without its end mark.
        with contextlib.suppress(zmq.ZMQError):
            for topic, sequence, batch in self._kept:
                if sequence >= first and wanted in (None, topic):
                    number = sequence.to_bytes(8, "big")
                    socket.send_multipart(
                        [who, b"", topic, number, batch], flags=zmq.NOBLOCK, copy=False
                    )
            socket.send_multipart([who, b"", b"", END_MARK, b""], flags=zmq.NOBLOCK)
        for topic, oldest in self._oldest_of.items():
            if first < oldest and wanted in (None, topic):
                self._on_short(topic)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # It has been rung often enough.
            os.eventfd_write(self._wake, 1)

    def _free(self) -> None:
        self._context.destroy(linger=LINGER_MS)
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    if not endpoint.startswith("ipc://"):
        socket.bind(endpoint)
        return
    path = Path(endpoint.removeprefix("ipc://")).expanduser()
    clear_way(path, SOCK_STREAM)  # ZMQ itself replaces whatever is there, a file as well.
    with socket_mode():  # From the first moment on.
        socket.bind(f"ipc://{path}")
